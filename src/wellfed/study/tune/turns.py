"""Measures the configurations of a tune, one at a time; what is in its folder is not measured again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wellfed.record.entries import RunRecord
from wellfed.study.executors.executor import Executor
from wellfed.study.points.grid import GridPoint, point_id
from wellfed.study.rows import Row, in_turn
from wellfed.study.study import Trials
from wellfed.study.trial_end import TrialKind, record_of
from wellfed.study.tune.trial import Change, TuneTrial, with_overrides


@dataclass
class TuneTrials:
    """Runs what a tune proposes."""

    start: tuple[str, ...]
    """Overrides of the start."""
    trials: Trials
    executor: Executor

    def point(self, overrides: Sequence[str]) -> GridPoint:
        """Returns the configuration with these overrides behind those of the start."""
        whole = with_overrides(self.start, overrides)
        return GridPoint(point_id(whole), {}, whole)

    def measure(self, change: Change) -> TuneTrial:
        """Returns the trial of a configuration; runs it if need be. A start that failed is always run again."""
        point, kept = self.point(change.overrides), self.trials.kept
        row = None if kept.missing([point.id]) else kept.latest.get(point.id)
        if row is not None and (row.status == "ok" or change.overrides):
            return self._of(row)
        began_s = time.monotonic()
        row = self._run(point)
        return self._of(row, max(0.0, time.monotonic() - began_s - row.seconds))

    def measure_again(self, change: Change, number: int) -> TuneTrial:
        """Returns the n-th measurement beyond the first trial; runs it if need be."""
        point = self.point(change.overrides)
        return self._of(
            self.trials.kept.known(point.id, "repeat", number) or self._run(point, "repeat", attempt=number)
        )

    def latest(self, change: Change) -> TuneTrial:
        """Returns the trial of what was measured before."""
        return self._of(self.trials.kept.latest[self.point(change.overrides).id])

    def round_of(self, overrides: Sequence[str], number: int) -> tuple[Row, Row]:
        """Returns the rows of the start and of this configuration in a round from 1; runs what is missing of it."""
        result = self.point(overrides)
        pair: list[tuple[TrialKind, GridPoint]] = [("before", self.point(())), ("after", result)]
        rows: dict[TrialKind, Row] = {}
        for kind, point in in_turn(pair, number - 1):
            known = self.trials.kept.known(result.id, kind, number)
            rows[kind] = known or self._run(point, kind, attempt=number, beside=result.id)
        return rows["before"], rows["after"]

    def _of(self, row: Row, beside_seconds: float = 0.0) -> TuneTrial:
        found = record_of(self.trials.kept.folder / row.folder) if row.folder else None
        return TuneTrial(row, found or RunRecord(row.point), beside_seconds)

    def _run(self, point: GridPoint, kind: TrialKind = "trial", **how: Any) -> Row:
        """Runs a trial if the point composes; else its row has the reason."""
        if point.id not in self.trials.ready and (error := self.trials.compose(point)) is not None:
            return self.trials.refuse(point, error)
        ((_, row),) = self.trials.run(self.executor, [self.trials.trial(point.id, kind, **how)])
        return row
