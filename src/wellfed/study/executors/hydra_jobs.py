"""Runs the jobs of a multirun in processes of their own, one a GPU at a time: ``hydra/launcher=wellfed``."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from wellfed import process
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED
from wellfed.observe.hardware.detect import machine
from wellfed.study.executors.fork_server import JobEnd
from wellfed.study.executors.local import prepare_to_fork
from wellfed.study.executors.pool import ForkServers, QueuedTrial, Slots, TrialPool, visible
from wellfed.units import show_duration

_IMPORTS_S = 600


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
    queue = [
        QueuedTrial(str(number), "", RunConfig(), number, job.folder, min(job.num_devices, len(gpus)))
        for number, job in enumerate(jobs)
    ]

    def work(_: None, number: int) -> int:
        return jobs[number].run()

    with (
        tempfile.TemporaryDirectory() as scratch,
        closing(ForkServers(_imports, work, lambda _: Path(scratch) / "log", _IMPORTS_S)) as servers,
    ):
        slots = Slots(gpus, process.CPUS_AT_START)
        pool = TrialPool(servers, slots, math.inf, lambda folder: folder.mkdir(parents=True, exist_ok=True))
        for done in pool.run(queue):
            if isinstance(done.end, JobEnd):
                codes[done.trial.task] = done.end.code
                took = show_duration(done.end.seconds)
                print(f"{done.trial.folder}: exit code {done.end.code} after {took}")
            else:
                print(f"{done.trial.folder}: not started: {done.end}", file=sys.stderr)
    return codes


def _imports(config: RunConfig) -> None:
    """Imports what each job would otherwise import itself."""
    with process.without_collections():
        import wellfed.run.stages  # noqa: F401
