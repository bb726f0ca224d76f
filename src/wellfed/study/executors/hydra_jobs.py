"""Runs the jobs of a multirun in processes of their own, one a GPU at a time: ``hydra/launcher=wellfed``."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from wellfed import process
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED
from wellfed.observe.hardware.detect import machine
from wellfed.study.executors.fork_server import ForkServer, ForkServerFailed, Job, JobEnd
from wellfed.study.executors.local import prepare_to_fork
from wellfed.study.executors.point_plans import import_trial_work
from wellfed.study.executors.slots import Slot, Slots, visible
from wellfed.units import show_duration


@dataclass(frozen=True)
class HydraJob:
    """One job of a multirun."""

    run: Callable[[], int]
    """Runs the job in the process that calls it, and returns its exit code."""
    folder: Path
    """Gets what the job prints."""
    num_devices: int


def in_processes(jobs: Sequence[HydraJob]) -> list[int]:
    """Runs all jobs. Returns the exit code of each, negative where a signal has ended it."""
    codes = [EXIT_FAILED] * len(jobs)
    prepare_to_fork(RunConfig())
    gpus = visible(os.environ, len(machine().gpus))
    slots, waiting = Slots(gpus, process.CPUS_AT_START), deque(range(len(jobs)))
    running: dict[int, Slot] = {}

    with (
        tempfile.TemporaryDirectory() as scratch,
        closing(ForkServer(lambda: jobs, Path(scratch) / "log", math.inf, imports=import_trial_work)) as server,
    ):
        try:
            server.wait_ready()
            while waiting or running:
                while waiting and (slot := slots.take(min(jobs[waiting[0]].num_devices, len(gpus)))) is not None:
                    number = waiting.popleft()
                    running[number], folder = slot, jobs[number].folder
                    folder.mkdir(parents=True, exist_ok=True)
                    server.start(Job(str(number), folder, partial(_run, number=number), slot.environment, slot.cpus))
                end = server.take()
                assert isinstance(end, JobEnd)
                number = int(end.key)
                slots.give_back(running.pop(number))
                codes[number] = end.code
                print(f"{jobs[number].folder}: exit code {end.code} after {show_duration(end.seconds)}")
        except ForkServerFailed as failed:
            for number in running:
                codes[number] = -signal.SIGKILL
                print(f"{jobs[number].folder}: ended with the process that had started it", file=sys.stderr)
            for number in waiting:
                print(f"{jobs[number].folder}: not started: {failed}", file=sys.stderr)
    return codes


def _run(jobs: Sequence[HydraJob], study: Connection, number: int) -> int:
    return jobs[number].run()
