"""Measures the configurations of a tune, one at a time; what is in its ledger is not measured again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from wellfed.record.entries import RunRecord
from wellfed.study.executors.executor import Executor
from wellfed.study.ledger import Ledger, in_turn
from wellfed.study.points.grid import GridPoint, point_id
from wellfed.study.row import Row, RowKind
from wellfed.study.study import Trials
from wellfed.study.trial_end import record_of
from wellfed.study.tune.trial import Change, TuneTrial, with_overrides


@dataclass
class TuneTrials:
    """Runs what a tune proposes."""

    start: tuple[str, ...]
    """Overrides of the start."""
    trials: Trials
    executor: Executor

    @property
    def ledger(self) -> Ledger:
        """Rows of the tune."""
        return self.trials.ledger

    def point(self, overrides: Sequence[str]) -> GridPoint:
        """Returns the configuration with these overrides behind those of the start."""
        whole = with_overrides(self.start, overrides)
        return GridPoint(point_id(whole), {}, whole)

    def measure(self, change: Change) -> TuneTrial:
        """Returns the trial of a configuration; runs it if need be. A start that failed is always run again."""
        point = self.point(change.overrides)
        row = None if self.ledger.missing([point.id]) else self.ledger.latest.get(point.id)
        if row is not None and (row.status == "ok" or change.overrides):
            return self._of(row)
        began_s = time.monotonic()
        self._run(point, "trial")
        trial = self.latest(change)
        return replace(trial, beside_seconds=max(0.0, time.monotonic() - began_s - trial.row.seconds))

    def measure_again(self, change: Change, number: int) -> TuneTrial:
        """Returns the n-th measurement beyond the last trial, or the one that failed now."""
        point = self.point(change.overrides)
        if len(known := self.ledger.repeats(point.id)) >= number:
            return self._of(known[number - 1])
        self._run(point, "repeat")
        return self._of(self.ledger.found.rows[-1])

    def latest(self, change: Change) -> TuneTrial:
        """Returns the last trial of what was measured before."""
        return self._of(self.ledger.latest[self.point(change.overrides).id])

    def compare(self, overrides: Sequence[str], rounds: int) -> list[tuple[Row, Row]]:
        """Returns rows of the start and of this configuration, measured in turns; fewer where it fails in a round."""
        start, result = self.point(()), self.point(overrides)
        while missing := self.rounds_missing(overrides, rounds):
            for point in in_turn([start, result], rounds - missing):
                self._run(point, "confirm")
            if self.rounds_missing(overrides, rounds) == missing:  # one of them can't run any more
                break
        return self._rounds(overrides)[:rounds]

    def rounds_missing(self, overrides: Sequence[str], rounds: int) -> int:
        """Returns the number of rounds still to be measured; 0 after one in which this configuration failed."""
        found = self._rounds(overrides)
        return 0 if any(row.status != "ok" for _, row in found) else max(0, rounds - len(found))

    def _rounds(self, overrides: Sequence[str]) -> list[tuple[Row, Row]]:
        """Returns the complete rounds of the start and this configuration.

        A round is two rows next to each other: a row of the start from another day would not cancel drift.
        """
        start, result, found = self.point(()).id, self.point(overrides).id, self.ledger.found
        confirms = [*found.confirms(start), *found.confirms(result)]
        rounds: list[tuple[Row, Row]] = []
        first: Row | None = None
        for row in found.rows:
            if not any(row is each for each in confirms):
                first = None
            elif first is None or first.point == row.point:
                first = row
            else:
                rounds.append((first, row) if row.point == result else (row, first))
                first = None
        return rounds

    def _of(self, row: Row) -> TuneTrial:
        found = record_of(self.ledger.folder / row.folder) if row.folder else None
        return TuneTrial(row, found or RunRecord(row.point))

    def _run(self, point: GridPoint, kind: RowKind) -> None:
        """Runs a trial if the point composes; else its row has the reason."""
        if point.id not in self.trials.ready and (error := self.trials.compose(point)) is not None:
            self.trials.refuse(point, error)
            return
        for _ in self.trials.run(self.executor, [self.trials.trial(point.id, kind)]):
            pass
