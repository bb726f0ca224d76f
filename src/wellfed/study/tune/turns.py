"""Measures the configurations of a tune, one at a time; what is in its ledger is not measured again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wellfed.record.entries import RunRecord
from wellfed.study.executors.executor import Executor
from wellfed.study.ledger import Ledger, in_turn
from wellfed.study.points.grid import GridPoint, point_id
from wellfed.study.points.guided.change import with_overrides
from wellfed.study.row import Row, RowKind
from wellfed.study.study import Trials
from wellfed.study.trial_end import record_of


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

    def measure(self, overrides: Sequence[str]) -> Row:
        """Returns the row of a configuration's trial; runs it if need be."""
        point = self.point(overrides)
        if (row := self._known(point)) is not None:
            return row
        self._run(point, "trial")
        return self.latest(overrides)

    def measure_again(self, overrides: Sequence[str], number: int) -> Row:
        """Returns the row of the n-th measurement beyond the last trial, or of the one that failed now."""
        point = self.point(overrides)
        if len(known := self.ledger.repeats(point.id)) >= number:
            return known[number - 1]
        before = len(self.ledger.found.rows)
        self._run(point, "repeat")
        return self.ledger.found.rows[-1] if len(self.ledger.found.rows) > before else self.latest(overrides)

    def _known(self, point: GridPoint) -> Row | None:
        """Returns a trial that need not be run. A start that failed is always run again: the tune needs it."""
        row = None if self.ledger.missing([point.id]) else self.ledger.latest.get(point.id)
        return None if row is None or (row.status != "ok" and point.id == self.point(()).id) else row

    def latest(self, overrides: Sequence[str]) -> Row:
        """Returns the last trial of what was measured before."""
        return self.ledger.latest[self.point(overrides).id]

    def record(self, row: Row) -> RunRecord | None:
        """Returns the trial's record; None where it left none."""
        return record_of(self.ledger.folder / row.folder) if row.folder else None

    def compare(self, overrides: Sequence[str], rounds: int) -> list[tuple[Row, Row]]:
        """Returns rows of the start and of this configuration, measured in turns; fewer where it fails in a round."""
        start, result = self.point(()), self.point(overrides)
        found = rounds_of(self.ledger, start.id, result.id)
        for number in range(len(found), rounds if self.rounds_missing(overrides, rounds) else 0):
            for point in in_turn([start, result], number):
                self._run(point, "confirm")
            found = rounds_of(self.ledger, start.id, result.id)
            if len(found) <= number or _has_failed(found):
                break
        return found[:rounds]

    def rounds_missing(self, overrides: Sequence[str], rounds: int) -> int:
        """Returns the number of rounds still to be measured; 0 after one in which this configuration failed."""
        found = rounds_of(self.ledger, self.point(()).id, self.point(overrides).id)
        return 0 if _has_failed(found) else max(0, rounds - len(found))

    def _run(self, point: GridPoint, kind: RowKind) -> None:
        """Runs a trial if the point composes; else its row has the reason."""
        if point.id not in self.trials.ready and (error := self.trials.compose(point)) is not None:
            self.trials.refuse(point, error)
            return
        for _ in self.trials.run(self.executor, [self.trials.trial(point.id, kind)]):
            pass


def rounds_of(kept: Ledger, first: str, second: str) -> list[tuple[Row, Row]]:
    """Returns the complete rounds in which two points were measured in turns, in whichever order."""
    counted = [*kept.found.confirms(first), *kept.found.confirms(second)]
    waiting: Row | None = None
    rounds = []
    for row in kept.found.rows:
        if not any(row is each for each in counted):
            continue
        if waiting is None or waiting.point == row.point:
            waiting = row
        else:
            rounds.append((waiting, row) if row.point == second else (row, waiting))
            waiting = None
    return rounds


def _has_failed(rounds: Sequence[tuple[Row, Row]]) -> bool:
    """Returns whether the second of the two failed: no further round will make it one to recommend."""
    return any(row.status != "ok" for _, row in rounds)
