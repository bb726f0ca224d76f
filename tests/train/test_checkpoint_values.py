"""Values in checkpoint files: what comes back as it was, what is refused, and files that would run code."""

import os
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch import nn

from tests.kit import loop, tiny
from wellfed.errors import WellfedError
from wellfed.train.checkpoint_values import load, readable, save


class Thing:
    pass


def kept(content: dict[str, Any], path: Path) -> dict[str, Any]:
    save(readable(content)[0], path)
    found: dict[str, Any] = load(path)
    return found


ARRAYS = {
    "of floats": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "empty": np.zeros((0, 3)),
    "without axes": np.array(3),
    "of text": np.array(["a", "bc"]),
    "of days": np.array(["2026-01-01"], "M8[ns]"),
    "with fields": np.array([("a", 1.5)], dtype=[("name", "U3"), ("value", "f4")]),
    "float32": np.float32(0.1),
    "bool": np.bool_(True),
    "nanoseconds": np.datetime64("2026-01-01T00:00:00.123456789"),
    "text": np.str_("a"),
}
VALUES = {
    "numbers": {1: (2.5, None, True, 1j), "size": torch.Size([2]), "of": torch.float16, "on": torch.device("cpu")},
    "bytes": b"\x00",
    "path": Path("a/b"),
    "pure path": PurePosixPath("a"),
    "now": datetime(2026, 1, 2, 3, 4, 5, 6),
    "with a zone": datetime(2026, 1, 2, tzinfo=UTC),
    "day": date(2026, 1, 2),
    "time": time(3, 4),
    "span": timedelta(3, 4),
    "counted": Counter("aab"),
    "set": {1, "a"},
    "frozen": frozenset({1, 2}),
    "queue": deque([np.int64(1), [Path("a")]], maxlen=3),
    "by default": defaultdict(list, {"a": [date(2026, 1, 2)]}),
    "without default": defaultdict(None, {"a": 1}),
    ("key", 1): [{"nested": (np.float64(0.5), deque())}],
}


def test_plain_values_and_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    found = kept({**ARRAYS, **VALUES}, tmp_path / "a.ckpt")
    for name, value in ARRAYS.items():
        assert type(found[name]) is type(value), name
        assert (found[name].dtype, found[name].tolist()) == (value.dtype, value.tolist()), name
    found["of floats"][0] = 1  # it can be written to
    for each, value in VALUES.items():
        assert (type(found[each]), found[each]) == (type(value), value), each
    assert found["queue"].maxlen == 3
    assert type(found["queue"][0]) is np.int64
    assert found["by default"]["new"] == []


def test_states_of_modules_and_optimizers_come_back_with_their_versions(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    content = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    found = kept(content, tmp_path / "a.ckpt")
    assert str(found) == str(content)
    assert type(found["state_dict"]) is OrderedDict
    assert found["state_dict"]._metadata == net.state_dict()._metadata  # BatchNorm's version among it
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]).state_dict()
    assert kept({"steps": steps}, tmp_path / "c.ckpt") == {"steps": steps}  # its milestones are a Counter


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Thing(), f"{__name__}.Thing"),
        ({"inner": [1, Thing()]}, f"{__name__}.Thing"),
        (Thing, "type"),
        (Decimal("1.10"), "decimal.Decimal"),
        ({Thing: 1}, "type"),
        (lambda: 0, "function"),
        (defaultdict(lambda: 0), "function"),
        (np.array([Thing()]), "numpy.ndarray (ObjectDType)"),
        (np.ma.array([1]), "MaskedArray"),
        (datetime(2026, 1, 2, tzinfo=ZoneInfo("UTC")), "datetime.datetime (ZoneInfo)"),
        (type("Own", (torch.Tensor,), {"__module__": "own"})(), "own.Own"),
        (type("Words", (dict,), {"__module__": "own"})(), "own.Words"),
    ],
)
def test_an_object_is_refused_with_its_keys_its_class_and_two_ways_out(value: Any, kind: str) -> None:
    checkpoint = {"hyper_parameters": {"net": Thing()}, "mine": {"value": value}, "step": 3}
    with pytest.raises(WellfedError, match=r"can't hold mine\.value") as refused:
        readable(checkpoint)
    assert kind in str(refused.value)
    assert "Save plain values" in str(refused.value)
    assert "trainer.trusted_checkpoints=true" in str(refused.value)


def test_hyperparameters_that_are_objects_are_left_out() -> None:
    layers = {"a": np.int64(1), "path": Path("a"), "net": Thing(), "layers": [Thing()]}
    content = {"hyper_parameters": layers, "hparams_type": Thing, "datamodule_hyper_parameters": {"x": Thing}}
    found, left_out = readable(content)
    assert found == {"hyper_parameters": {"a": 1, "path": "a"}, "datamodule_hyper_parameters": {}}
    assert left_out == [
        "hyper_parameters.net",
        "hyper_parameters.layers",
        "hparams_type",
        "datamodule_hyper_parameters.x",
    ]


class Called:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_a_file_of_a_stranger_calls_nothing_else(tmp_path: Path) -> None:
    """numpy's own pickles could place an array of objects at any address."""
    made = tmp_path / "made"
    for number, content in enumerate(
        (Called(os.mkdir, str(made)), np.ones(2), Called(np.ndarray, (1,), "O", b"8bytes.."))
    ):
        torch.save({"a": content}, tmp_path / f"{number}.ckpt")
        with pytest.raises(pickle.UnpicklingError):
            load(tmp_path / f"{number}.ckpt")
    assert not made.exists()
    load(tmp_path / "0.ckpt", trusted=True)
    assert made.exists()


class WithState(tiny.TinyModel):
    """A plain model with a state of its own."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> dict[str, Any]:
        return {"own": self.extra}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state["own"]


@pytest.mark.parametrize("trusted", [False, True])
def test_a_plain_models_own_state_comes_back_or_is_refused_before_the_first_step(tmp_path: Path, trusted: bool) -> None:
    def fit(extra: Any, steps: int, checkpoint: Path | None = None) -> WithState:
        model = WithState(extra)
        keeps = loop.checkpoints(tmp_path, trusted=trusted)
        loop.fit(loop.model(model=model), checkpoints=keeps, max_steps=steps, checkpoint=checkpoint)
        return model

    model = WithState(Thing())
    if not trusted:
        with pytest.raises(WellfedError, match="_extra_state.own"):
            loop.fit(loop.model(model=model), checkpoints=loop.checkpoints(tmp_path), max_steps=1)
        assert model.calls == 0
    fit([np.arange(3), Thing() if trusted else deque([1])], 2)
    found = fit(None, 4, tmp_path / "last.ckpt").extra
    assert found[0].tolist() == [0, 1, 2]
    assert type(found[1]) is (Thing if trusted else deque)


class Late(WithState):
    """A plain model whose state is no plain value from its first step on."""

    def loss(self, batch: Any) -> Any:
        self.extra = Thing()
        return super().loss(batch)


def test_a_state_that_comes_with_the_first_step_is_refused_at_the_first_checkpoint(tmp_path: Path) -> None:
    model = Late(None)
    with pytest.raises(WellfedError, match="_extra_state.own"):
        loop.fit(loop.model(model=model), checkpoints=loop.checkpoints(tmp_path, every_steps=2), max_steps=5)
    assert model.calls == 2
