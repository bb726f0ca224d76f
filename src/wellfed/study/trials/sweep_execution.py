"""Runs the trials of a sweep with an executor: the missing ones, then the best again, in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from wellfed.study.executors.executor import Executor, ExecutorLost, Trial
from wellfed.study.sweep.ledger import Row
from wellfed.study.trials.sweep_ledger import SweepLedger
from wellfed.study.trials.sweep_screen import SweepScreen
from wellfed.study.trials.trial_ledger import TrialLedger
from wellfed.study.trials.trial_setup import ReadyPoint
from wellfed.units import counted


class SweepExecution:
    """Hands points to an executor, and each finished row to the ledger.

    Args:
        ready: points that compose, by id.
        ledger: rows of the sweep.
        screen: shows how the sweep gets on.
        executor: has been entered.
        fail_fast: start no further trial after one that did not end well.
    """

    def __init__(
        self,
        ready: Mapping[str, ReadyPoint],
        ledger: SweepLedger,
        screen: SweepScreen,
        executor: Executor,
        *,
        fail_fast: bool,
    ) -> None:
        self._ready, self._ledger, self._screen = ready, ledger, screen
        self._executor, self._fail_fast = executor, fail_fast

    def run_missing(self) -> bool:
        """Runs the points that have no row. Returns False if it stopped before all were run."""
        missing = self._ledger.missing(self._ready)
        self._screen.begin(len(missing), self._ledger.best())
        return self._run(missing, "trial")

    def confirm(self) -> None:
        """Measures the best again, a round after the other, each on the machine that measured it."""
        again = self._ledger.to_confirm(self._ready)
        self._screen.begin(len(again), self._ledger.best(), "Measuring the best again, in turn")
        number = len(set(again))
        for first in range(0, len(again), number or 1):
            if not self._run(again[first : first + number], "confirm"):
                return

    def _run(self, points: Sequence[str], kind: Literal["trial", "confirm"]) -> bool:
        trials = []
        for point in points:
            ready = self._ready[point]
            row = replace(self._ledger.begin(ready.point, kind), host="", machine="")
            host = self._ledger.host_of(point) if kind == "confirm" else ""
            trials.append(Trial(ready.composed, ready.point.overrides, row, host=host))
        all_well, num_refused, num_run = True, 0, 0
        try:
            for _, row in self._executor.run(trials, alone=kind == "confirm"):
                add_or_refuse(self._ledger, self._ready[row.point], row)
                num_refused, num_run = num_refused + (not row.folder), num_run + bool(row.folder)
                if self._fail_fast and row.status != "ok":
                    self._executor.start_no_more()
                    all_well = False
        except ExecutorLost as lost:
            self._screen.say(f"{lost} The same command again runs what is missing.")
            return False
        if not all_well and not num_run:
            refused = counted(num_refused, "point")
            self._screen.say(f"sweep.fail_fast=true, and {refused} can't be run: none is started.")
        return all_well


def add_or_refuse(ledger: TrialLedger, ready: ReadyPoint, row: Row) -> None:
    """Writes a finished row. One of a point that can't be run is written once, however often the command is given."""
    if row.status in ("invalid", "infeasible") and not row.folder:
        message = str((row.error or {}).get("message", ""))
        ledger.refuse(ready.point, row.status, message, row.predicted_peak_gib)
    else:
        ledger.add(row)
