"""The lock of a run folder, against a real second process."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import wellfed
from wellfed.errors import ConfigError
from wellfed.run.folder import lock
from wellfed.run.folder.lock import FILE_NAME, only_one

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
SOURCE = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}


@contextmanager
def holder(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that is inside until it gets a line; its children go with it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *more],
        env=SOURCE,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "inside\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_second_process_is_refused_until_the_first_leaves(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(ConfigError) as caught, only_one(tmp_path):
            raise AssertionError("inside with another")
        (fault,) = caught.value.faults
        assert str(fault) == f"{tmp_path}: another process is writing to it. Wait for its end, or stop it."
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "outside\n"
        with only_one(tmp_path):
            tried = subprocess.run(
                [sys.executable, "-c", TRY, str(tmp_path)], env=SOURCE, text=True, capture_output=True
            )
            assert "another process is writing to it" in tried.stdout, tried
    with only_one(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_another_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with holder(tmp_path), only_one(tmp_path / "a"):
        pass


def test_it_ends_with_its_process_also_where_forked_workers_live_on(tmp_path: Path) -> None:
    with holder(tmp_path, "fork") as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        os.killpg(first.pid, 0)  # the worker is there
        with only_one(tmp_path):
            pass


def test_it_ends_with_an_error_inside(tmp_path: Path) -> None:
    with pytest.raises(KeyError), only_one(tmp_path):
        raise KeyError
    with only_one(tmp_path):
        tried = subprocess.run([sys.executable, "-c", TRY, str(tmp_path)], env=SOURCE, text=True, capture_output=True)
    assert "another process" in tried.stdout
    tried = subprocess.run([sys.executable, "-c", TRY, str(tmp_path)], env=SOURCE, text=True, capture_output=True)
    assert tried.stdout == "inside\n"


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


@pytest.mark.skipif(sys.platform == "win32", reason="fcntl is of POSIX")
def test_a_file_system_without_locks_is_entered_without(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    with holder(tmp_path), only_one(tmp_path):
        pass
