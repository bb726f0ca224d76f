"""Keeps a process on the machine where it is: starts it, hands it orders, brings back its answers.

Sent to other machines by value, which may have another version of this project or none: standard library alone, and
nothing of wellfed.

    keeper --- greeting, orders --> process
           <---- a frame each -----
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, BinaryIO

_LENGTH_BYTES = 8
_LAST_BYTES = 4096
_GRACE_S = 5
_OF_OTHERS = (
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASKS_PER_NODE"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
"""What would tell a run that others of its own are started beside it: each order is a run by itself."""


@dataclass(frozen=True)
class ProcessSettings:
    """What to start, the same on every machine."""

    arguments: tuple[str, ...]
    """Of the Python that runs the keeper."""
    folder: str
    """Where it works."""
    python_path: tuple[str, ...]
    """Folders that are searched first for modules; left out where they are not there."""
    greeting: bytes
    """Its first frame. It answers with what keeps it from working there, or nothing."""


@dataclass(frozen=True)
class OrderEnd:
    """What a keeper has to tell of an order."""

    host: str
    answer: bytes | None
    """None: the process has ended without one, and ``problem`` says how."""
    problem: str = ""
    is_unfit: bool = False
    """Nothing was started: the machine is not fit for it."""


class Keeper:
    """One such process; `greet` before the first order."""

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  what the process prints

    def greet(self) -> OrderEnd:
        """Start the process; its answer, or why there is none."""
        settings, host = self._settings, socket.gethostname()
        if not os.path.isdir(settings.folder):
            return OrderEnd(host, None, f"there is no folder {settings.folder}", is_unfit=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
        searched = [folder for folder in settings.python_path if os.path.isdir(folder)]
        kept["PYTHONPATH"] = os.pathsep.join([*searched, *filter(None, [kept.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, *settings.arguments],
            cwd=settings.folder,
            env=kept,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )
        told = self.do(settings.greeting)
        problem = told.problem if told.answer is None else told.answer.decode()
        return OrderEnd(host, told.answer, problem, is_unfit=bool(problem))

    def do(self, order: bytes) -> OrderEnd:
        """Blocks until the order is done."""
        host, process = socket.gethostname(), self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, order)
            return OrderEnd(host, read_frame(process.stdout))
        except (EOFError, OSError):
            return OrderEnd(host, None, self._end())

    def close(self) -> None:
        """End the process and what it has started."""
        self._said.close()
        if (process := self._process) is None:
            return
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        try:
            process.wait(_GRACE_S)  # it ends when it has nobody to talk to
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._process = None

    def _end(self) -> str:
        """How the process has ended."""
        assert self._process is not None
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "its process says nothing any more"
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = [line for line in self._said.read().decode("utf-8", "replace").splitlines() if line.strip()]
        names = {number.value: number.name for number in signal.Signals}
        how = f"ended by {names.get(-code, -code)}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}{': ' if lines else ''}{lines[-1] if lines else ''}"


def do_one(settings: ProcessSettings, order: bytes) -> OrderEnd:
    """One order in a process of its own."""
    keeper = Keeper(settings)
    try:
        greeted = keeper.greet()
        return greeted if greeted.is_unfit else keeper.do(order)
    finally:
        keeper.close()


def write_frame(stream: BinaryIO | Any, content: bytes) -> None:
    """Raises OSError: nobody reads it."""
    stream.write(len(content).to_bytes(_LENGTH_BYTES) + content)
    stream.flush()


def read_frame(stream: BinaryIO | Any) -> bytes:
    """Blocks. Raises EOFError: no more comes."""
    return _exactly(stream, int.from_bytes(_exactly(stream, _LENGTH_BYTES)))


def _exactly(stream: BinaryIO | Any, size: int) -> bytes:
    found: bytes = stream.read(size)
    if len(found) < size:
        raise EOFError
    return found
