"""Runs the trials of a sweep: what is missing, then the best again, in turn. Import after `prepare_to_fork`."""

from __future__ import annotations

from collections.abc import Callable

from wellfed.config.quoting import assigned
from wellfed.config.schema import SweepConfig
from wellfed.study.sweep.rows import recorded_row, refused_row
from wellfed.study.trials.sweep_ledger import SweepLedger
from wellfed.study.trials.sweep_screen import SweepScreen
from wellfed.study.trials.trial_execution import TrialExecution, open_trial_folder
from wellfed.study.trials.trial_pool import ForkServers
from wellfed.study.trials.trial_setup import TrialSetup

Launch = Callable[[list[list[str]]], object]
"""Another launcher of Hydra's: runs each list of overrides somewhere, and returns when all have ended."""


class SweepExecution:
    """Runs what a set-up has made ready, and gives each end to the ledger."""

    def __init__(
        self, setup: TrialSetup, ledger: SweepLedger, screen: SweepScreen, servers: ForkServers, config: SweepConfig
    ) -> None:
        self._ready, self._ledger, self._screen = setup.ready, ledger, screen
        self._trials = TrialExecution(
            setup.ready, ledger, servers, setup.gpus, config.timeout_s, screen.tick, config.fail_fast
        )

    def run_missing(self) -> bool:
        """False: stopped at the first that did not end well."""
        missing = self._ledger.missing(self._ready)
        self._screen.begin(len(missing), self._ledger.best())
        return self._trials.run(missing, "trial")

    def confirm(self) -> None:
        """The best, measured again in turn; rounds in which all of them have been count, whenever they were."""
        again = self._ledger.to_confirm(self._ready)
        self._screen.begin(len(again), self._ledger.best(), "Measuring the best again, in turn")
        for point in again:  # one at a time: nothing disturbs a measurement
            if not self._trials.run([point], "confirm"):
                return

    def launch_missing(self, launch: Launch) -> None:
        """The same trials by Hydra's own means, told when all have ended."""
        missing, folder = self._ledger.missing(self._ready), self._ledger.folder
        self._screen.begin(len(missing), self._ledger.best())
        jobs = []
        for point in missing:
            open_trial_folder(folder / point)
            where = [assigned("hydra.sweep.dir", str(folder.absolute())), f"hydra.sweep.subdir={point}"]
            jobs.append([*self._ready[point].point.overrides, *where])
        if jobs:
            launch(jobs)
        for point in missing:
            row = self._ledger.begin(self._ready[point].point, "trial")
            self._ledger.add(recorded_row(row, folder) or refused_row(row, "failed", "left no complete record"))
