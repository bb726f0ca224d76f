"""Measures the configurations of a tune, one at a time; what is in its ledger is not measured again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from wellfed.record import RunRecord
from wellfed.run.folder import lock
from wellfed.study.executors.executor import Executor, Trial
from wellfed.study.sweep import ledger
from wellfed.study.sweep.grid import GridPoint, point_id
from wellfed.study.sweep.ledger import Row, RowKind
from wellfed.study.trials.sweep_execution import add_or_refuse
from wellfed.study.trials.trial_ledger import TrialLedger
from wellfed.study.trials.trial_setup import TrialSetup
from wellfed.study.tune.tune_trial import typed_behind


class TuneLedger(TrialLedger):
    """The rows of a tune."""

    def _recorded(self, begun: Row) -> Row | None:
        """With the tune's own version of the code: where that had changed, all of the folder was put aside."""
        row = super()._recorded(begun)
        return None if row is None else replace(row, code=begun.code)

    def finished(self, point: str) -> Row | None:
        """The trial of a point; None where it has to be run, or run again."""
        return None if ledger.missing([point], self._found, self._retry) else self.latest(point)

    @property
    def points(self) -> set[str]:
        """That have a trial."""
        return set(self._found.latest())

    def latest(self, point: str) -> Row | None:
        """Its last trial, whatever became of it."""
        return self._found.latest().get(point)

    def repeats(self, point: str) -> list[Row]:
        """Measurements of a point again, while it was searched."""
        return self._found.of(point, "repeat")

    def rounds(self, first: str, second: str) -> list[tuple[Row, Row]]:
        """Of two points measured in turn, whichever came first in a round; what was cut short is no round."""
        counted = [*self._found.confirms(first), *self._found.confirms(second)]
        waiting: Row | None = None
        found = []
        for row in self._found.rows:
            if not any(row is each for each in counted):
                continue
            if waiting is None or waiting.point == row.point:
                waiting = row
            else:
                found.append((waiting, row) if row.point == second else (row, waiting))
                waiting = None
        return found

    def set_aside(self) -> str:
        """Put all that is in the folder into one within it, and begin anew; its name."""
        names = (f"before{number}" for number in count(1))
        aside = next(self.folder / name for name in names if not (self.folder / name).exists())
        entries = [each for each in self.folder.iterdir() if not each.name.startswith(("before", lock.FILE_NAME))]
        aside.mkdir()
        for each in entries:
            each.rename(aside / each.name)
        self._found = ledger.read(self.folder)
        return aside.name


@dataclass
class TuneTrials:
    """Runs what a search proposes."""

    words: tuple[str, ...]
    """Of the start."""
    setup: TrialSetup
    ledger: TuneLedger
    executor: Executor

    def point(self, overrides: Sequence[str]) -> GridPoint:
        """The configuration with these behind the words of the start."""
        words = typed_behind(self.words, overrides)
        return GridPoint(point_id(words), {}, words)

    def measure(self, overrides: Sequence[str]) -> Row:
        """What became of its trial."""
        point = self.point(overrides)
        if (row := self._known(point)) is not None:
            return row
        self.ledger.adopt([point])  # it ended just when the tune was killed
        if (row := self._known(point)) is not None:
            return row
        if self._is_ready(point):
            self._run(point, "trial")
        return self.latest(overrides)

    def measure_again(self, overrides: Sequence[str], number: int) -> Row:
        """What became of the n-th measurement beyond the trial."""
        point = self.point(overrides)
        if len(self.ledger.repeats(point.id)) < number and self._is_ready(point):
            self._run(point, "repeat")
        rows = self.ledger.repeats(point.id)
        return rows[number - 1] if len(rows) >= number else self.latest(overrides)

    def _known(self, point: GridPoint) -> Row | None:
        """Its trial, where it need not be run; a start that failed is always run again, since nothing is tuned
        without it."""
        row = self.ledger.finished(point.id)
        return None if row is None or (row.status != "ok" and point.id == self.point(()).id) else row

    def kept_as_they_are(self) -> Counter[str]:
        """Trials that did not end well and are not run again, by status."""
        rows = filter(None, map(self.ledger.finished, self.ledger.points - {self.point(()).id}))
        return Counter(row.status for row in rows if row.status != "ok")

    def latest(self, overrides: Sequence[str]) -> Row:
        """What became of the last trial of what was measured before."""
        row = self.ledger.latest(self.point(overrides).id)
        assert row is not None
        return row

    def record(self, row: Row) -> RunRecord | None:
        """What the trial has recorded; None where it has not come to that."""
        if not row.folder:
            return None
        try:
            return RunRecord.read(self.ledger.folder / row.folder)
        except (OSError, ValueError):
            return None

    def compare(self, overrides: Sequence[str], rounds: int) -> list[tuple[Row, Row]]:
        """Rows of the start and of this configuration, measured in turn; fewer where it fails in one of them."""
        start, result = self.point(()), self.point(overrides)
        found = self.ledger.rounds(start.id, result.id)
        if self.rounds_missing(overrides, rounds) and self._is_ready(start) and self._is_ready(result):
            for number in range(len(found), rounds):
                # Every other round backwards: nobody always follows the same one.
                for point in (start, result) if number % 2 == 0 else (result, start):
                    self._run(point, "confirm")
                found = self.ledger.rounds(start.id, result.id)
                if _has_failed(found):
                    break
        return found[:rounds]

    def rounds_missing(self, overrides: Sequence[str], rounds: int) -> int:
        """Of so many, in which the start and this configuration are not measured yet; none after one in which it has
        failed."""
        found = self.ledger.rounds(self.point(()).id, self.point(overrides).id)
        return 0 if _has_failed(found) else max(0, rounds - len(found))

    def _is_ready(self, point: GridPoint) -> bool:
        """Returns whether a point composes; else it has a row that says why not."""
        if point.id not in self.setup.ready:
            self.setup.compose([point])
        return point.id in self.setup.ready

    def _run(self, point: GridPoint, kind: RowKind) -> None:
        ready = self.setup.ready[point.id]
        trial = Trial(ready.composed, point.overrides, self.ledger.begin(point, kind))
        for _, row in self.executor.run([trial]):
            add_or_refuse(self.ledger, ready, row)


def _has_failed(rounds: Sequence[tuple[Row, Row]]) -> bool:
    """The second of the two did not end well: no further round will make it one to recommend."""
    return any(row.status != "ok" for _, row in rounds)
