"""Makes a trial of a whole training, and a row of its end: for a search here and on other machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.study.search.search_file import SearchFile
from wellfed.study.search.search_rows import SearchRow, learned_row
from wellfed.study.sweep.rows import refused_row
from wellfed.study.trials.fork_server import JobEnd
from wellfed.study.trials.tasks import TrainWhole, is_for_cpu, shared_key
from wellfed.study.trials.trial_pool import FinishedTrial, QueuedTrial


def num_gpus(composed: Composed[RunConfig], gpus: Sequence[str]) -> int:
    """That it takes of those; 0 = it trains on the processor."""
    return 0 if is_for_cpu(composed) else min(composed.config.trainer.devices, len(gpus))


def whole_training(
    point: str, composed: Composed[RunConfig], search: Path, gpus: Sequence[str], *, asks: bool = False
) -> QueuedTrial:
    """A point as a pool takes it; ``search``: the folder of all trials."""
    own = search / point
    task, shared = TrainWhole(replace(composed, run_dir=own)), shared_key(composed.config)
    return QueuedTrial(point, shared, composed.config, task, own, num_gpus(composed, gpus), asks)


def row_of_training(finished: FinishedTrial, row: SearchRow, search: Path, file: SearchFile) -> SearchRow:
    """What became of it, with what was known before."""
    if isinstance(end := finished.end, JobEnd):
        return learned_row(row, search, end.code, end.seconds, file=file, timed_out=finished.timed_out)
    return replace(refused_row(row, end.status, str(end)), folder="")
