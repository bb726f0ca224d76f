"""The lock of a run folder, against real other processes."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import wellfed
from wellfed.errors import ConfigError
from wellfed.run.folder.lock import holds_nothing, only_one

HOLD = """
import multiprocessing, sys, time
from pathlib import Path
from wellfed.run.folder.lock import only_one
with only_one(Path(sys.argv[1])):
    if "fork" in sys.argv:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(3,), daemon=False).start()
    print("inside", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def holder(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Yields another process that holds the lock of a folder."""
    environment = {**os.environ, "PYTHONPATH": str(Path(wellfed.__file__).parents[1])}
    command = [sys.executable, "-c", HOLD, str(folder), *arguments]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        try:
            yield process
        finally:
            process.kill()


def told(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught, only_one(folder):
        pass
    return str(caught.value)


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        name = f"process {other.pid} on {socket.gethostname()}"
        assert f"another process is writing to it ({name}). Wait for its end" in told(tmp_path)
    with only_one(tmp_path):
        pass


@pytest.mark.parametrize("arguments", [(), ("fork",)], ids=["alone", "with a forked worker that lives on"])
def test_a_killed_process_leaves_no_lock(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with holder(tmp_path, *arguments) as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with only_one(tmp_path):
            assert json.loads((tmp_path / ".lock.json").read_text())["pid"] == os.getpid()


def test_a_process_that_was_replaced_waits_for_what_it_has_forked(tmp_path: Path) -> None:
    with only_one(tmp_path):
        own = (tmp_path / ".lock.json").read_text()
    with holder(tmp_path) as forked:
        (tmp_path / ".lock.json").write_text(own)
        threading.Timer(1.0, forked.kill).start()
        with only_one(tmp_path):
            pass


def test_the_folder_is_made_and_its_own_lock_is_nothing_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with only_one(folder, make=True):
        assert holds_nothing(folder)
        (folder / "run.json").touch()
        assert not holds_nothing(folder)
    assert {path.name for path in folder.iterdir()} == {".lock", "run.json"}


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"paths\.log_dir: .*can't be locked"), only_one(tmp_path / "file", make=True):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ConfigError), only_one(tmp_path / "made", make=True):
        pass
    assert not list(tmp_path.iterdir())
    found = told(tmp_path)
    assert f"paths.log_dir: {tmp_path} can't be locked: " in found
    assert "on a file system with file locks" in found
