"""Runs trials that are ready, and gives each end to the ledger. Import after `prepare_to_fork`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import wellfed.process
from wellfed.study.sweep.ledger import Row, RowKind
from wellfed.study.sweep.rows import ended_row, refused_row
from wellfed.study.trials.fork_server import JobEnd
from wellfed.study.trials.tasks import RunPoint, shared_key
from wellfed.study.trials.trial_ledger import TrialLedger
from wellfed.study.trials.trial_pool import FinishedTrial, ForkServers, QueuedTrial, Slots, TrialPool


@dataclass
class TrialExecution:
    """Runs points in the places that ``gpus`` give, as CUDA_VISIBLE_DEVICES names them."""

    ready: Mapping[str, RunPoint]
    ledger: TrialLedger
    servers: ForkServers
    gpus: Sequence[str]
    timeout_s: float
    tick: Callable[[], None]
    fail_fast: bool = False
    """Start no further one after a trial that did not end well."""

    def __post_init__(self) -> None:
        slots = Slots(self.gpus, wellfed.process.CPUS_AT_START)
        self._pool = TrialPool(self.servers, slots, self.timeout_s, open_trial_folder, self.tick)

    def run(self, points: Sequence[str], kind: RowKind) -> bool:
        """All of them; False: stopped at the first that did not end well."""
        begun, queue = {}, []
        for point in points:
            ready = self.ready[point]
            row, trial = queued(ready, self.ledger.begin(ready.point, kind), self.ledger.folder)
            begun[trial.key] = row
            queue.append(trial)
        all_well = True
        for finished in self._pool.run(queue):
            row = row_of(finished, begun[finished.trial.key], self.ledger.folder)
            self.ledger.add(row)
            if self.fail_fast and row.status != "ok":
                self._pool.start_no_more()
                all_well = False
        return all_well


def queued(ready: RunPoint, row: Row, folder: Path) -> tuple[Row, QueuedTrial]:
    """A trial as a pool takes it, with what is known of it by then; ``folder``: of all trials."""
    own, config = folder / row.folder, ready.composed.config
    task = replace(ready, composed=replace(ready.composed, run_dir=own))
    num_gpus = 0
    if ready.plan is not None:
        row = replace(row, predicted_peak_gib=ready.plan.predicted_peak_gib)
        num_gpus = ready.plan.num_gpus
    return row, QueuedTrial(row.folder, shared_key(config), config, task, own, num_gpus)


def row_of(finished: FinishedTrial, row: Row, folder: Path) -> Row:
    """What became of it, with what was known before."""
    if isinstance(end := finished.end, JobEnd):
        return ended_row(row, folder, end.code, end.seconds, timed_out=finished.timed_out)
    return refused_row(row, end.status, str(end))


def open_trial_folder(folder: Path) -> None:
    """Make it; an earlier attempt's is kept beside."""
    if folder.exists():
        asides = (folder.with_name(f"{folder.name}.attempt{number}") for number in count(1))
        folder.rename(next(aside for aside in asides if not aside.exists()))
    folder.mkdir()
