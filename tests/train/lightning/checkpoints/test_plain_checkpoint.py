import logging
from collections import Counter, OrderedDict
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from wellfed.train.lightning.checkpoints.plain_checkpoint import PlainCheckpointIO, plain


class Thing:
    pass


def test_what_is_plain_stays_as_it_is(tmp_path: Path):
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    content = {
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "numbers": {1: (2.5, None, True), "size": torch.Size([2]), "of": torch.float16, "on": torch.device("cpu")},
        "milestones": Counter([3, 5]),
        "inf": float("inf"),
        "some": {1, 2},
        "raw": b"\x00",
    }
    PlainCheckpointIO().save_checkpoint(content, tmp_path / "a.ckpt")
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert str(loaded) == str(content)
    assert type(loaded["state_dict"]) is OrderedDict
    assert loaded["state_dict"]._metadata == content["state_dict"]._metadata  # BatchNorm's version among it


def test_objects_are_left_out_and_named():
    left_out: list[str] = []
    kept = plain(
        {
            "path": Path("a/b"),
            "number": np.float64(0.5),
            "frozen": MappingProxyType({"x": 1}),
            "thing": Thing(),
            "kind": Thing,
            "nested": {"thing": Thing(), "x": 1},
            "list": [1, Thing()],
            "list of dicts": [{"thing": Thing(), "x": 1}],
            ("tuple", 1): 2,
            Thing: 3,
        },
        left_out,
    )
    assert kept == {
        "path": "a/b",
        "number": 0.5,
        "frozen": {"x": 1},
        "nested": {"x": 1},
        "list of dicts": [{"x": 1}],
        ("tuple", 1): 2,
    }
    names = ["thing (Thing)", "kind (type)", "nested.thing (Thing)", "list (Thing)", "list of dicts.thing (Thing)"]
    assert left_out[:5] == names
    assert len(left_out) == 6  # and the key


def test_a_hidden_name_is_the_users_as_any(tmp_path: Path):
    for name in (".x.ckpt", ".x.ckpt.tmp"):
        PlainCheckpointIO().save_checkpoint({"step": 3}, str(tmp_path / name))
        assert torch.load(tmp_path / name, weights_only=True) == {"step": 3}


def test_one_line_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    writer = PlainCheckpointIO()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.save_checkpoint({"a": Thing(), "b": Thing()}, tmp_path / "a.ckpt")
    (line,) = caplog.messages
    assert "a (Thing), b (Thing)" in line
