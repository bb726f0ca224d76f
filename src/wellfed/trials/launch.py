"""Jobs of a multirun in processes of their own, one a GPU at a time: what ``hydra/launcher=wellfed`` does."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wellfed.cpus
from wellfed.config.schema import RunConfig
from wellfed.errors import EXIT_FAILED
from wellfed.hardware.detect import machine
from wellfed.trials.fork_server import Ended, StemFailed
from wellfed.trials.slots import Slots, visible
from wellfed.trials.sweep import prepare_to_fork
from wellfed.trials.trial_pool import Stems, Trial, Trials
from wellfed.units import show_duration

_IMPORTS_S = 600


@dataclass(frozen=True)
class HydraJob:
    """One job."""

    run: Callable[[], int]
    """Does it, in whichever process it is called; gives its exit code."""
    folder: Path
    """Gets what it prints."""
    num_devices: int


def in_processes(jobs: Sequence[HydraJob], environment: Any) -> list[int]:
    """Runs all; the exit code of each, negative where a signal has ended it.

    Args:
        environment: this process's, where CUDA_VISIBLE_DEVICES may be set.
    """
    codes = [EXIT_FAILED] * len(jobs)

    def on_end(trial: Trial, ended: Ended, timed_out: bool) -> bool:
        codes[trial.task] = ended.code
        print(f"{trial.folder}: exit code {ended.code} after {show_duration(ended.seconds)}")
        return True

    def on_failed(trial: Trial, failed: StemFailed) -> bool:
        print(f"{trial.folder}: not started: {failed}", file=sys.stderr)
        return True

    prepare_to_fork(RunConfig())
    gpus = visible(environment, len(machine().gpus))
    with (
        tempfile.TemporaryDirectory() as scratch,
        closing(
            Stems(_imports, lambda _, number: jobs[number].run(), lambda number: Path(scratch) / "log", _IMPORTS_S)
        ) as stems,
    ):
        Trials(
            stems=stems,
            slots=Slots(gpus, wellfed.cpus.AT_START),
            timeout_s=math.inf,
            on_start=lambda trial: trial.folder.mkdir(parents=True, exist_ok=True),
            on_end=on_end,
            on_failed=on_failed,
            on_tick=lambda: None,
        ).run(
            Trial(str(number), "", RunConfig(), number, job.folder, min(job.num_devices, len(gpus)))
            for number, job in enumerate(jobs)
        )
    return codes


def _imports(config: RunConfig) -> None:
    """What each job would otherwise wait for."""
    import wellfed.run.stages  # noqa: F401
