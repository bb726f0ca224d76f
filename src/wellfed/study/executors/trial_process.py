"""Starts the process that runs a trial, on the machine where it is called.

Ray and submitit send this file by value: that machine may have another version of the project, or none. So it imports
the standard library alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

_OF_RANKS = (
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASKS_PER_NODE"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables by which a run takes itself for a rank of another. Each trial is a run of its own."""
_LAST_BYTES = 4096


@dataclass(frozen=True)
class ProcessStart:
    """A program to start, the same on every machine."""

    program: str
    """Python code. It reads the trial from standard input and writes its answer to standard output."""
    folder: str
    """Working directory."""
    python_path: tuple[str, ...]
    """Folders that are searched first for modules; left out where they do not exist."""


@dataclass(frozen=True)
class ProcessAnswer:
    """The answer of a trial's process. Without ``content`` either the trial is lost or the machine is unfit."""

    host: str
    content: bytes | None
    problem: str = ""
    is_unfit: bool = False
    """The trial was not started: this machine can't run trials of the study."""


def run_process(start: ProcessStart, trial: bytes) -> ProcessAnswer:
    """Runs a trial and returns the answer of its process; blocks."""
    host = socket.gethostname()
    if not os.path.isdir(start.folder):
        return ProcessAnswer(host, None, f"there is no folder {start.folder}", is_unfit=True)
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(
            [sys.executable, "-c", start.program],
            cwd=start.folder,
            env=own_environment(start.python_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            start_new_session=True,
        ) as process:
            try:
                content, _ = process.communicate(trial)
            except BaseException:  # the job is cancelled
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        said = last_line(printed)
    if process.returncode < 0:
        name = signal_name(-process.returncode)
        return ProcessAnswer(host, None, f"the process that watched the trial was ended by {name}")
    if process.returncode > 0:
        problem = said or f"its process ended with exit code {process.returncode}"
        return ProcessAnswer(host, None, problem, is_unfit=True)
    return ProcessAnswer(host, content)


def keep_to_share(gpus: Sequence[object], number: int) -> None:
    """Keeps this thread, and the processes that it starts, to the CPUs of its GPUs; each of the machine's has as many.

    Does nothing where a GPU's number is not below ``number``: CUDA_VISIBLE_DEVICES names others there.
    """
    if number < 2 or not hasattr(os, "sched_setaffinity"):
        return
    cpus, named = sorted(os.sched_getaffinity(0)), set(map(str, gpus))
    size = len(cpus) // number
    share = {cpu for gpu in range(number) if str(gpu) in named for cpu in cpus[gpu * size : (gpu + 1) * size]}
    if share and len(share) == size * len(named):
        os.sched_setaffinity(0, share)


def own_environment(python_path: Sequence[str]) -> dict[str, str]:
    """Returns the variables of a process that trains by itself, where this process may be a rank of another run.

    Args:
        python_path: folders that are searched first for modules; left out where they do not exist.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}
    searched = [folder for folder in python_path if os.path.isdir(folder)]
    return {**kept, "PYTHONPATH": os.pathsep.join([*searched, *filter(None, [kept.get("PYTHONPATH")])])}


def last_line(printed: BinaryIO) -> str:
    """Returns the last line of a file that is not blank; empty without one."""
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - _LAST_BYTES))
    lines = printed.read().decode("utf-8", "replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


def signal_name(number: int) -> str:
    """Returns the name of a signal; the number of a real-time signal, which has none."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, str(number))
