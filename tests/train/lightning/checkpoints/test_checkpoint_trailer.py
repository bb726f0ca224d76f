"""Checkpoints with a digest: written beside their target, checked as a whole, copied with other facts."""

import errno
import gc
import io
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.meeting import together
from wellfed.run.folder.checkpoint_file import is_readable
from wellfed.train.lightning.checkpoints import checkpoint_trailer

STATE = {"global_step": 3, "state_dict": {"w": torch.arange(50.0)}}


def save(file: Any) -> None:
    torch.save(STATE, file)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "last.ckpt"
    checkpoint_trailer.write(place, save, {"step": 3})
    return place


def loads(path: Path) -> bool:
    try:
        found = torch.load(path, weights_only=True)
        return torch.equal(found["state_dict"]["w"], STATE["state_dict"]["w"]) and found["global_step"] == 3
    except Exception:  # noqa: BLE001  torch raises whatever the damage leads to
        return False


@pytest.mark.parametrize("mmap", [True, False])
def test_torch_and_zipfile_read_it_as_any_other(path: Path, mmap: bool) -> None:
    assert torch.equal(torch.load(path, mmap=mmap, weights_only=True)["state_dict"]["w"], STATE["state_dict"]["w"])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b'wellfed {"step": 3} sha256 ')
    assert checkpoint_trailer.facts_of(path) == {"step": 3}
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


def test_any_byte_that_changes_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for place in [*range(0, len(whole) - 200, 23), *range(len(whole) - 200, len(whole))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert not is_readable(path) or loads(path), place


def test_a_file_that_is_cut_or_grown_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0", whole[1:]):
        path.write_bytes(damaged)
        assert not is_readable(path) or loads(path)


def test_a_checkpoint_of_an_earlier_version_has_no_trailer(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.ckpt")
    assert checkpoint_trailer.is_intact(tmp_path / "old.ckpt") is None
    assert checkpoint_trailer.facts_of(tmp_path / "old.ckpt") is None
    assert is_readable(tmp_path / "old.ckpt")
    checkpoint_trailer.copy(tmp_path / "old.ckpt", tmp_path / "new.ckpt", {"best": 1.5})
    assert checkpoint_trailer.is_intact(tmp_path / "new.ckpt")
    assert loads(tmp_path / "new.ckpt")


def test_a_copy_adds_its_facts(path: Path) -> None:
    best = path.with_name("best.ckpt")
    checkpoint_trailer.copy(path, best, {"best": {"loss": 0.5}})
    checkpoint_trailer.copy(best, best, {"best": {"loss": 0.25}})
    assert checkpoint_trailer.facts_of(best) == {"step": 3, "best": {"loss": 0.25}}
    assert checkpoint_trailer.is_intact(best)
    assert loads(best)
    assert checkpoint_trailer.facts_of(path) == {"step": 3}


def test_small_pieces_come_out_whole(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)

    def piecewise(file: Any) -> None:
        for number in range(len(buffer.getvalue())):
            file.write(buffer.getvalue()[number : number + 1])

    checkpoint_trailer.write(tmp_path / "a", piecewise, {})
    assert checkpoint_trailer.is_intact(tmp_path / "a")
    assert loads(tmp_path / "a")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    resource = pytest.importorskip("resource")
    before, old = resource.getrlimit(resource.RLIMIT_FSIZE), path.read_bytes()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, before[1]))
    try:
        with pytest.raises(OSError) as caught:  # noqa: PT011  its errno says it
            checkpoint_trailer.write(path, save, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == old
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


def test_an_interrupt_within_torchs_writer_comes_out_of_it(path: Path) -> None:
    class Interrupted(BaseException):
        pass

    def stop(*_: Any) -> None:
        raise Interrupted

    old, handler = path.read_bytes(), signal.signal(signal.SIGALRM, stop)
    large = {f"w{number}": torch.zeros(10_000) for number in range(1000)}

    def save_again_and_again(file: Any) -> None:
        for _ in range(500):
            torch.save(large, file)

    gc.collect()
    gc.disable()  # an error within a `__del__` or a callback of the collection is lost
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interrupted):
            checkpoint_trailer.write(path, save_again_and_again, {})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        gc.enable()
    assert path.read_bytes() == old
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


WRITE = """
import io, os, zipfile
from pathlib import Path
from tests.kit.meeting import meet_before
from wellfed.train.lightning.checkpoints import checkpoint_trailer

def save(file):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("me", os.environ["MEETING_ME"] * 200_000)
    file.write(content.getvalue())

meet_before("wellfed.train.lightning.checkpoints.checkpoint_trailer.replace", "written")
checkpoint_trailer.write(Path("model.ckpt"), save, {}, is_shared=True)
"""


def test_two_runs_that_save_under_one_name_of_the_users_leave_a_whole_file(tmp_path: Path) -> None:
    done = together([WRITE, WRITE], tmp_path / "meeting", cwd=tmp_path)
    assert [each.code for each in done] == [0, 0], done
    assert checkpoint_trailer.is_intact(tmp_path / "model.ckpt")
    with zipfile.ZipFile(tmp_path / "model.ckpt") as archive:
        assert len({*archive.read("me")}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model.ckpt", "meeting"}
