"""Whole, damaged and foreign checkpoint files."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from wellfed.errors import ConfigError
from wellfed.run.folder.checkpoint_file import RESUMED, is_readable, load_checkpoint

STATE: dict[str, Any] = {"global_step": 3, "state_dict": {"w": torch.arange(500.0)}}
WHOLE = {**STATE, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A checkpoint as a run writes it, with its digest."""
    path = tmp_path / "last.ckpt"
    torch.save(WHOLE, path)
    return path


def told(path: Path, way_out: str = "Name another, e.g. last-1.ckpt", **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(path, **more)
    (fault,) = caught.value.faults
    assert fault.where == str(path)
    assert fault.way_out.startswith(way_out)
    return fault.problem


def test_a_whole_checkpoint_is_loaded(own: Path) -> None:
    assert is_readable(own)
    state = load_checkpoint(own, RESUMED)
    assert state["global_step"] == 3
    assert torch.equal(state["state_dict"]["w"], STATE["state_dict"]["w"])


@pytest.mark.parametrize("place", [0.5, 0.9])
def test_a_byte_that_was_flipped_is_found_although_torch_may_load_it(own: Path, place: float) -> None:
    assert is_readable(own)
    data = bytearray(own.read_bytes())
    data[int(place * len(data))] ^= 0xFF
    own.with_name("new").write_bytes(data)
    own.with_name("new").replace(own)
    assert not is_readable(own)


@pytest.mark.parametrize("kept", [0, 10, 1000, -200])
def test_a_checkpoint_cut_anywhere_is_not_readable(own: Path, kept: int) -> None:
    own.write_bytes(own.read_bytes()[:kept])
    assert not is_readable(own)


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        ({"weights": 1}, "state_dict"),
        (torch.zeros(3), "state_dict"),
    ],
)
def test_torchs_file_without_a_runs_content(tmp_path: Path, content: object, missing: str) -> None:
    torch.save(content, tmp_path / "x.ckpt")
    assert f"it holds no {missing}" in told(tmp_path / "x.ckpt")


@pytest.mark.parametrize("key", ["callbacks", "optimizer_states"])
def test_a_key_that_a_resume_needs_is_named_if_it_is_missing(tmp_path: Path, key: str) -> None:
    """As in a file of weights alone, or of another version."""
    torch.save({name: value for name, value in WHOLE.items() if name != key}, tmp_path / "x.ckpt")
    assert f"it holds no {key}" in told(tmp_path / "x.ckpt", keys=RESUMED)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> object:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({**STATE, "more": Code()}, tmp_path / "x.ckpt")
    problem = told(tmp_path / "x.ckpt", "If you trust whoever wrote the file, add trainer.trusted_checkpoints=true.")
    assert problem == "holds objects (posix.mkdir), which run code when they are read."
    assert not (tmp_path / "ran").exists()
    load_checkpoint(tmp_path / "x.ckpt", trusted=True)
    assert (tmp_path / "ran").exists()


def test_no_file_and_no_archive(tmp_path: Path) -> None:
    assert "No such file" in told(tmp_path / "none")
    (tmp_path / "x.ckpt").write_text("text")
    assert not is_readable(tmp_path / "x.ckpt")
    assert "is no checkpoint that can be loaded" in told(tmp_path / "x.ckpt")
