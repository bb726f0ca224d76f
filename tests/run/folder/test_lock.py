"""The lock of a run folder, against real other processes: here, and as if on another machine."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import wellfed
from tests.kit.meeting import can_be_elsewhere, elsewhere
from wellfed.errors import ConfigError
from wellfed.run.folder import lock
from wellfed.run.folder.lock import FILE_NAME, held_by, holds_nothing, is_ours, only_one

HOLD = """
import multiprocessing, sys, time
from pathlib import Path
from wellfed.run.folder.lock import only_one
with only_one(Path(sys.argv[1])):
    if "fork" in sys.argv:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=False).start()
    print("inside", flush=True)
    sys.stdin.readline()
print("outside", flush=True)
sys.stdin.readline()
"""
TRY = """
import sys
from pathlib import Path
from wellfed.run.folder.lock import only_one
from wellfed.errors import ConfigError
try:
    with only_one(Path(sys.argv[1])):
        print("inside")
except ConfigError as error:
    print(error)
"""
ASK_SLOWLY = """
import os, sys
from pathlib import Path
from wellfed.run.folder import lock
close = os.close
def late(descriptor):
    print("asked", flush=True)
    sys.stdin.readline()
    close(descriptor)
os.close = late
print(lock.held_by(Path(sys.argv[1])), flush=True)
"""
LOCK_SLOWLY = """
import sys
from pathlib import Path
from wellfed.run.folder import lock
now = lock._lock
def late(descriptor):
    lock._lock = now
    print("opened", flush=True)
    sys.stdin.readline()
    now(descriptor)
lock._lock = late
folder = Path(sys.argv[1])
with lock.only_one(folder, make="make" in sys.argv):
    print("inside", (folder / ".lock").exists(), flush=True)
    sys.stdin.readline()
"""
NAME_SLOWLY = """
import sys
from pathlib import Path
from wellfed.run.folder import lock
now = lock._name
def late(descriptor):
    print("locked", flush=True)
    sys.stdin.readline()
    return now(descriptor)
lock._name = late
with lock.only_one(Path(sys.argv[1])):
    print("inside", flush=True)
    sys.stdin.readline()
"""
SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}


@contextmanager
def process(program: str, folder: Path, *more: str, host: str = "") -> Iterator[subprocess.Popen[str]]:
    """A Python program with its pipes; its children go with it at the end."""
    words = [sys.executable, "-c", program, str(folder), *more]
    begun = subprocess.Popen(
        elsewhere(host, words) if host else words,
        env=SOURCE,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert begun.stdin is not None
    assert begun.stdout is not None
    try:
        yield begun
    finally:
        with suppress(ProcessLookupError):
            os.killpg(begun.pid, signal.SIGKILL)
        begun.wait()
        begun.stdin.close()
        begun.stdout.close()


def line(begun: subprocess.Popen[str]) -> str:
    assert begun.stdout is not None
    return begun.stdout.readline().strip()


def go_on(begun: subprocess.Popen[str]) -> None:
    assert begun.stdin is not None
    begun.stdin.write("\n")
    begun.stdin.flush()


@contextmanager
def holder(folder: Path, *more: str, host: str = "") -> Iterator[subprocess.Popen[str]]:
    """Another process that is inside until it gets a line."""
    with process(HOLD, folder, *more, host=host) as begun:
        assert line(begun) == "inside"
        yield begun


def tried(folder: Path, around: Sequence[str] = ()) -> str:
    words = [*around, sys.executable, "-c", TRY, str(folder)]
    return subprocess.run(words, env=SOURCE, text=True, capture_output=True).stdout.strip()


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught, only_one(folder):
        raise AssertionError("inside with another")
    (fault,) = caught.value.faults
    return str(fault)


def test_a_second_process_is_refused_until_the_first_leaves(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        assert refusal(tmp_path) == (
            f"{tmp_path}: another process is writing to it (process {first.pid} on {socket.gethostname()}). Wait for "
            "its end, stop it, or take another folder."
        )
        go_on(first)
        assert line(first) == "outside"
        with only_one(tmp_path):
            assert "another process is writing to it" in tried(tmp_path)
    with only_one(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert (tmp_path / FILE_NAME).read_text() == ""


def test_another_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with holder(tmp_path), only_one(tmp_path / "a"):
        pass


def test_it_ends_with_its_process_also_where_forked_workers_live_on(tmp_path: Path) -> None:
    with holder(tmp_path, "fork") as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        os.killpg(first.pid, 0)  # the worker is there
        with only_one(tmp_path):  # whatever name is left in the file
            assert json.loads((tmp_path / FILE_NAME).read_text())["pid"] == os.getpid()


def test_it_ends_with_an_error_inside(tmp_path: Path) -> None:
    with pytest.raises(KeyError), only_one(tmp_path):
        raise KeyError
    with only_one(tmp_path):
        assert "another process" in tried(tmp_path)
    assert tried(tmp_path) == "inside"


# -- who holds it ----------------------------------------------------------------------------------------------------


def test_who_holds_it_is_known_without_taking_it(tmp_path: Path) -> None:
    assert held_by(tmp_path) is None
    with holder(tmp_path) as first:
        assert held_by(tmp_path) == f"process {first.pid} on {socket.gethostname()}"
        (tmp_path / FILE_NAME).write_text("{")
        assert held_by(tmp_path) == "another process"
    assert held_by(tmp_path) is None
    with only_one(tmp_path):
        assert held_by(tmp_path) is None
        assert "another process" in tried(tmp_path)  # asking has not unlocked it


def test_who_asks_keeps_nobody_out(tmp_path: Path) -> None:
    """A process that looks for a run to resume asks about each, also about one that another process resumes now."""
    with holder(tmp_path):
        pass
    with process(ASK_SLOWLY, tmp_path) as asking:
        assert line(asking) == "asked"
        with only_one(tmp_path):
            assert tried(tmp_path) != "inside"
        go_on(asking)
        assert line(asking) == "None"


@pytest.mark.parametrize("host", [None, "there"])
def test_a_killed_process_is_not_named_in_place_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str | None
) -> None:
    """The next has the lock, and has not written its name yet."""
    with holder(tmp_path):
        pass
    left = json.loads((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(json.dumps({**left, "host_name": host or left["host_name"]}))
    with process(NAME_SLOWLY, tmp_path) as second:
        assert line(second) == "locked"
        if host is None:
            assert held_by(tmp_path) == "another process"
            with monkeypatch.context() as now:
                now.setattr(lock, "_NAMED_WITHIN_S", 0.0)
                assert f"{tmp_path}: another process is writing to it. Wait" in refusal(tmp_path)

        def until_named(seconds: float) -> None:
            monkeypatch.undo()
            go_on(second)
            assert line(second) == "inside"

        monkeypatch.setattr(time, "sleep", until_named)
        assert f"(process {second.pid} on {socket.gethostname()})" in refusal(tmp_path)
        assert held_by(tmp_path) == f"process {second.pid} on {socket.gethostname()}"


def test_a_users_file_of_that_name_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("mine")
    with only_one(tmp_path):
        assert not is_ours(tmp_path)
        assert f"{tmp_path}: another process is writing to it. Wait" in tried(tmp_path)
    assert (tmp_path / FILE_NAME).read_text() == "mine"
    (tmp_path / "other").mkdir()
    with only_one(tmp_path / "other"):
        assert is_ours(tmp_path / "other")


# -- folders that come and go ------------------------------------------------------------------------------------------


def test_a_lock_whose_file_was_removed_meanwhile_is_no_lock(tmp_path: Path) -> None:
    """The first removes its folder before it leaves, while the second has the file open. A third comes after that."""
    folder = tmp_path / "new"
    with process(LOCK_SLOWLY, folder, "make") as second:
        assert line(second) == "opened"
        with only_one(folder, make=True):
            shutil.rmtree(folder)
        go_on(second)
        assert line(second) == "inside True"
        assert "another process is writing to it" in refusal(folder)


def test_a_folder_is_made_with_all_above_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with only_one(folder, make=True):
        assert holds_nothing(folder)
        (folder / "file").touch()
        assert not holds_nothing(folder)
    assert not holds_nothing(tmp_path / "none")
    (tmp_path / "file").touch()
    told = r"paths\.log_dir: .*file/a can't be made: Not a directory"
    with pytest.raises(ConfigError, match=told), only_one(tmp_path / "file" / "a", make=True):
        raise AssertionError("inside of what is no folder")


# -- two machines that share a folder ----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux" or not can_be_elsewhere(), reason="no namespaces may be made")
def test_a_process_on_another_machine_is_named_with_it(tmp_path: Path) -> None:
    """Its number there may be that of another process here."""
    with holder(tmp_path, host="there") as first:
        assert "another process is writing to it (process 1 on there). Wait" in refusal(tmp_path)
        assert held_by(tmp_path) == "process 1 on there"
        go_on(first)
        assert line(first) == "outside"
        assert held_by(tmp_path) is None
    with only_one(tmp_path):
        told = tried(tmp_path, elsewhere("there", []))
        assert f"(process {os.getpid()} on {socket.gethostname()})" in told
    with holder(tmp_path, host="there") as first:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        end_s = time.monotonic() + 5
        while held_by(tmp_path) is not None and time.monotonic() < end_s:  # the kernel ends the namespace after it
            time.sleep(0.01)
        with only_one(tmp_path):
            pass


# -- where there can be no lock ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_can_not_be_written_is_entered_without(tmp_path: Path, monkeypatch, code: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    entered = False
    with only_one(tmp_path):
        entered = True
    assert entered
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_entered_without(tmp_path: Path) -> None:
    with pytest.raises(KeyError), only_one(tmp_path / "none"):  # what is raised inside is not taken for its own
        raise KeyError


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    monkeypatch.setattr(os, "lockf", refuse)


@pytest.mark.skipif(sys.platform == "win32", reason="fcntl is of POSIX")
@pytest.mark.usefixtures("no_locks")
def test_a_file_system_without_locks_is_entered_unless_a_living_process_is_named(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        told = refusal(tmp_path)
        assert f"(process {first.pid} on " in told
        assert told.endswith(f"If there is no such process, delete {tmp_path / FILE_NAME}.")
        assert held_by(tmp_path) is None
    left = json.loads((tmp_path / FILE_NAME).read_text())
    assert left["pid"] == first.pid  # it was killed
    with only_one(tmp_path):
        pass
    assert (tmp_path / FILE_NAME).read_text() == ""
    (tmp_path / FILE_NAME).write_text(json.dumps({**left, "host_name": "there"}))
    with only_one(tmp_path):  # as a requeued job enters, whose node has died
        assert json.loads((tmp_path / FILE_NAME).read_text())["pid"] == os.getpid()
    (tmp_path / FILE_NAME).write_text('{"pid": 1e400}')
    with only_one(tmp_path):
        pass
