"""Whole, damaged and foreign checkpoint files."""

import os
import pickle
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.examples import examples
from wellfed.errors import ConfigError
from wellfed.run.folder.checkpoint_file import is_readable, load_checkpoint, load_to_resume

STATE = {"global_step": 3, "state_dict": {"w": torch.arange(500.0)}}
WEIGHTS_ONLY = {**STATE, "epoch": 0, "pytorch-lightning_version": "2.6.0", "loops": {"fit_loop": {}}}
"""Keys that Lightning writes with ``save_weights_only=True``."""
LIGHTNINGS = {**WEIGHTS_ONLY, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
"""Keys that Lightning writes otherwise."""
OURS = {
    **LIGHTNINGS,
    "position": {"epoch": 0, "batch": 3, "stream": {"total": 3, "is_over": False}},
    "validation_is_due": False,
    "rng": {},
    "rng_of_ranks": [{}],
    "figures": {},
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    torch.save(STATE, path)
    return path


def told(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(path)
    (fault,) = caught.value.faults
    assert fault.where == str(path)
    assert fault.way_out == "Name another, e.g. last-1.ckpt."
    return fault.problem


def test_a_whole_checkpoint_is_loaded(whole: Path) -> None:
    assert is_readable(whole)
    state = load_checkpoint(whole)
    assert state["global_step"] == 3
    assert torch.equal(state["state_dict"]["w"], STATE["state_dict"]["w"])


def test_a_large_one_is_read_once(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait while rank 0 looks whether a run has one, whether that is whole, and at what it holds."""
    read, testzip = [], zipfile.ZipFile.testzip
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: read.append(self.filename) or testzip(self))
    assert is_readable(whole)
    assert is_readable(whole)
    assert read == [str(whole)]
    if sys.platform == "linux":
        state = load_checkpoint(whole)  # its tensors lie in the file
        assert str(whole) in Path("/proc/self/maps").read_text()
        assert torch.equal(state["state_dict"]["w"], STATE["state_dict"]["w"])
    torch.save({**STATE, "more": 1}, whole.with_name("new"))
    whole.with_name("new").replace(whole)
    assert is_readable(whole)
    assert len(read) == 2
    whole.unlink()
    assert not is_readable(whole)


def test_a_weight_that_was_flipped_is_found_although_torch_loads_it(whole: Path) -> None:
    data = bytearray(whole.read_bytes())
    weights = STATE["state_dict"]["w"].numpy().tobytes()
    data[bytes(data).index(weights) + 1000] ^= 0xFF
    whole.write_bytes(data)
    assert not torch.equal(torch.load(whole, weights_only=True)["state_dict"]["w"], STATE["state_dict"]["w"])
    assert not is_readable(whole)


@examples(75)
@given(place=st.floats(0, 1, exclude_max=True), by=st.integers(1, 255))
def test_any_flipped_byte_is_found_or_harmless(tmp_path_factory: pytest.TempPathFactory, place: float, by: int) -> None:
    path = tmp_path_factory.mktemp("flip") / "last.ckpt"
    torch.save(STATE, path)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= by
    path.write_bytes(data)
    if not is_readable(path):
        return
    try:
        state = load_checkpoint(path)
    except ConfigError:
        return
    assert state["global_step"] == 3
    assert torch.equal(state["state_dict"]["w"], STATE["state_dict"]["w"])


@settings(max_examples=40)
@given(kept=st.integers(0, 4000))
def test_a_checkpoint_cut_anywhere_is_not_readable(tmp_path_factory: pytest.TempPathFactory, kept: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "last.ckpt"
    torch.save(STATE, path)
    data = path.read_bytes()
    path.write_bytes(data[: min(kept, len(data) - 1)])
    assert not is_readable(path)
    told(path)


@pytest.mark.parametrize(
    ("members", "readable"),
    [
        ((), False),
        (("archive/data.pkl",), False),
        (("archive/version",), False),
        (("data.pkl", "version"), False),
        (("archive/data.pkl", "archive/version"), True),  # torch's by its names; loading tells
    ],
)
def test_a_foreign_archive(tmp_path: Path, members: tuple[str, ...], readable: bool) -> None:
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in members:
            archive.writestr(name, "3\n")
    assert is_readable(path) is readable
    assert told(path).startswith("is no checkpoint that can be loaded (")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"weights": 1}, "is no checkpoint of a run: it holds no state_dict and no global_step."),
        ({"state_dict": {}}, "is no checkpoint of a run: it holds no global_step."),
        ({"state_dict": 3, "global_step": 3}, "is no checkpoint of a run: it holds no state_dict."),
        (torch.zeros(3), "is no checkpoint of a run: it holds no state_dict and no global_step."),
    ],
)
def test_torchs_file_without_a_runs_content(tmp_path: Path, content: object, problem: str) -> None:
    torch.save(content, tmp_path / "x.ckpt")
    assert is_readable(tmp_path / "x.ckpt")
    assert told(tmp_path / "x.ckpt") == problem


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> object:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({**STATE, "more": Code()}, tmp_path / "x.ckpt")
    assert told(tmp_path / "x.ckpt") == "is no checkpoint that can be loaded (Weights only load failed)."
    (tmp_path / "x.ckpt").write_bytes(pickle.dumps(Code(), protocol=2))
    told(tmp_path / "x.ckpt")
    assert not (tmp_path / "ran").exists()


def test_no_file_and_no_archive(tmp_path: Path) -> None:
    assert told(tmp_path / "none") == "can't be read: No such file or directory."
    (tmp_path / "x.ckpt").write_text("text")
    assert not is_readable(tmp_path / "x.ckpt")
    assert told(tmp_path / "x.ckpt").startswith("is no checkpoint that can be loaded (")


@pytest.mark.parametrize("content", [LIGHTNINGS, OURS, {**LIGHTNINGS, "position": {"of a module's own": 3}}])
def test_a_run_goes_on_from_what_lightning_or_a_run_writes(tmp_path: Path, content: dict[str, object]) -> None:
    torch.save(content, tmp_path / "x.ckpt")
    assert load_to_resume(tmp_path / "x.ckpt").keys() == content.keys()


def refusal(path: Path) -> str:
    """Returns the message about a checkpoint that no run goes on from."""
    assert load_checkpoint(path)["global_step"] == 3  # can be evaluated
    with pytest.raises(ConfigError) as caught:
        load_to_resume(path)
    (fault,) = caught.value.faults
    assert fault.where == str(path)
    assert fault.way_out.startswith("Name another, e.g. last-1.ckpt, or start a run whose model loads these weights: ")
    assert 'torch.load(file, weights_only=True)["state_dict"]' in fault.way_out
    return fault.problem


def test_weights_alone_are_no_start_of_a_resume(tmp_path: Path) -> None:
    torch.save(WEIGHTS_ONLY, tmp_path / "x.ckpt")
    missing = "callbacks and no optimizer_states and no lr_schedulers"
    assert refusal(tmp_path / "x.ckpt") == f"can't be resumed from: it holds no {missing}."
    torch.save(STATE, tmp_path / "x.ckpt")
    missing = f"pytorch-lightning_version and no loops and no {missing}"
    assert refusal(tmp_path / "x.ckpt") == f"can't be resumed from: it holds no {missing}."


@pytest.mark.parametrize("key", [key for key in LIGHTNINGS if key not in (*STATE, "epoch")])
def test_a_key_that_a_resume_needs_is_named_if_it_is_missing(tmp_path: Path, key: str) -> None:
    torch.save({name: value for name, value in OURS.items() if name != key}, tmp_path / "x.ckpt")
    assert refusal(tmp_path / "x.ckpt") == f"can't be resumed from: it holds no {key}."


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        *(
            ({key: "x"}, f"{key} is of type str, and must be {kind}")
            for key, kind in {
                "loops": "dict",
                "callbacks": "dict",
                "optimizer_states": "list",
                "lr_schedulers": "list",
                "position": "dict",
                "validation_is_due": "bool",
                "rng": "dict",
                "rng_of_ranks": "list",
                "figures": "dict",
            }.items()
        ),
        ({"pytorch-lightning_version": 2.6}, "pytorch-lightning_version is of type float, and must be str"),
        ({"loops": {}}, "it holds no loops.fit_loop"),
        ({"loops": {"fit_loop": 3}}, "loops.fit_loop is of type int, and must be dict"),
        ({"position": {"epoch": None, "batch": 3}}, "position.epoch is of type NoneType, and must be int"),
        ({"position": {"epoch": 0, "batch": 3, "stream": []}}, "position.stream is of type list, and must be dict"),
        ({"position": {"epoch": 0, "batch": 3, "stream": {}}}, "it holds no position.stream.is_over"),
        (
            {"position": {"epoch": -1, "batch": 10**400}},
            "position.epoch is below 0 or above 2**63; position.batch is below 0 or above 2**63",
        ),
        (
            {"loops": {}, "callbacks": 3, "rng": 3},
            "it holds no loops.fit_loop; "
            "callbacks is of type int, and must be dict; rng is of type int, and must be dict",
        ),
    ],
)
def test_a_key_of_another_type_is_named(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    torch.save({**OURS, **change}, tmp_path / "x.ckpt")
    assert refusal(tmp_path / "x.ckpt") == f"can't be resumed from: {problem}."


def test_a_step_that_is_no_number_is_named(tmp_path: Path) -> None:
    torch.save({**OURS, "global_step": "x"}, tmp_path / "x.ckpt")
    with pytest.raises(ConfigError, match="global_step is of type str, and must be int"):
        load_to_resume(tmp_path / "x.ckpt")
