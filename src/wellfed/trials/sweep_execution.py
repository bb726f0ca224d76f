"""Runs the trials of a sweep: what is missing, then the best again, in turn. Import after `prepare_to_fork`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import wellfed.cpus
from wellfed.config.quoting import assigned
from wellfed.config.schema import SweepConfig
from wellfed.sweep.ledger import Row
from wellfed.sweep.rows import ended_row, recorded_row, refused_row
from wellfed.trials.fork_server import JobEnd
from wellfed.trials.slots import Slots
from wellfed.trials.sweep_ledger import SweepLedger
from wellfed.trials.sweep_screen import SweepScreen
from wellfed.trials.sweep_setup import ReadyPoint, SweepSetup
from wellfed.trials.trial import RunPoint, shared_key
from wellfed.trials.trial_pool import FinishedTrial, ForkServers, QueuedTrial, TrialPool

Launch = Callable[[list[list[str]]], object]
"""Another launcher of Hydra's: runs each list of overrides somewhere, and returns when all have ended."""


class SweepExecution:
    """Runs what a set-up has made ready, and gives each end to the ledger."""

    def __init__(
        self, setup: SweepSetup, ledger: SweepLedger, screen: SweepScreen, servers: ForkServers, config: SweepConfig
    ) -> None:
        self._ready, self._ledger, self._screen, self._config = setup.ready, ledger, screen, config
        slots = Slots(setup.gpus, wellfed.cpus.AT_START)
        self._pool = TrialPool(servers, slots, config.timeout_s, open_trial_folder, screen.tick)

    def run_missing(self) -> bool:
        """False: stopped at the first that did not end well."""
        missing = self._ledger.missing(self._ready)
        self._screen.begin(len(missing), self._ledger.best())
        return self._run(missing, "trial")

    def confirm(self) -> None:
        """The best, measured again in turn; rounds in which all of them have been count, whenever they were."""
        again = self._ledger.to_confirm(self._ready)
        self._screen.begin(len(again), self._ledger.best(), "Measuring the best again, in turn")
        for point in again:  # one at a time: nothing disturbs a measurement
            if not self._run([point], "confirm"):
                return

    def launch_missing(self, launch: Launch) -> None:
        """The same trials by Hydra's own means, told when all have ended."""
        missing = self._ledger.missing(self._ready)
        self._screen.begin(len(missing), self._ledger.best())
        jobs = []
        for point in missing:
            open_trial_folder(self._ledger.folder / point)
            where = [assigned("hydra.sweep.dir", str(self._ledger.folder.absolute())), f"hydra.sweep.subdir={point}"]
            jobs.append([*self._ready[point].point.overrides, *where])
        if jobs:
            launch(jobs)
        for point in missing:
            row = self._ledger.begin(self._ready[point].point, "trial")
            recorded = recorded_row(row, self._ledger.folder)
            self._ledger.add(recorded or refused_row(row, "failed", "left no complete record"))

    def _run(self, points: Sequence[str], kind: Literal["trial", "confirm"]) -> bool:
        begun = {row.folder: row for row in (self._begin(self._ready[point], kind) for point in points)}
        all_well = True
        for finished in self._pool.run([self._queued(row) for row in begun.values()]):
            row = self._row(begun[finished.trial.key], finished)
            self._ledger.add(row)
            if self._config.fail_fast and row.status != "ok":
                self._pool.start_no_more()
                all_well = False
        return all_well

    def _begin(self, ready: ReadyPoint, kind: Literal["trial", "confirm"]) -> Row:
        predicted_peak_gib = None if ready.plan is None else ready.plan.predicted_peak_gib
        return replace(self._ledger.begin(ready.point, kind), predicted_peak_gib=predicted_peak_gib)

    def _queued(self, row: Row) -> QueuedTrial:
        ready, folder = self._ready[row.point], self._ledger.folder / row.folder
        composed = replace(ready.composed, run_dir=folder)
        return QueuedTrial(
            key=row.folder,
            shared=shared_key(composed.config),
            config=composed.config,
            task=RunPoint(composed, ready.plan, ready.feature_rows),
            folder=folder,
            num_gpus=0 if ready.plan is None else ready.plan.num_gpus,
        )

    def _row(self, begun: Row, finished: FinishedTrial) -> Row:
        end = finished.end
        if not isinstance(end, JobEnd):
            return refused_row(begun, end.status, str(end))
        folder, timed_out = self._ledger.folder, finished.timed_out
        return ended_row(begun, folder, exit_code=end.code, seconds=end.seconds, timed_out=timed_out)


def open_trial_folder(folder: Path) -> None:
    """Make it; an earlier attempt's is kept beside."""
    if folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.attempt{number}")).exists():
            number += 1
        folder.rename(aside)
    folder.mkdir()
