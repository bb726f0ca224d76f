"""Starts commands that start many processes, as a shell does, and tells which of these are left."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.end_to_end.commands import ROOT, environment


@contextmanager
def started(script: str, arguments: Sequence[str], *, cwd: Path, python_path: str) -> Iterator[subprocess.Popen[str]]:
    """In a process group of its own; what it leaves is ended."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "src" / script), *arguments],
        cwd=cwd,
        env=environment(PYTHONPATH=python_path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        for each in left_in(cwd):
            each.kill()


def left_in(cwd: Path) -> list[psutil.Process]:
    """All that it started stay in the folder where it was started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(cwd) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(is_so: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for it, as long as the process lives."""
    end_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end_s, "waited in vain"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)
