"""Proposes the points of a search: the next of a grid, or what Optuna asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from wellfed.study.learning_curve import read_curve
from wellfed.study.ledger import Ledger
from wellfed.study.points.grid import GridPoint, point_of
from wellfed.study.points.space import Space, size
from wellfed.study.row import Row
from wellfed.study.trial_end import record_of

if TYPE_CHECKING:
    from wellfed.study.points.optuna_study import OptunaStudy

_MOST_REPEATS = 200
"""Known points that Optuna may ask for in a row before the space counts as tried."""


Proposal = tuple[int, GridPoint]
"""Number of a trial and the point to be tried."""


class GridPoints:
    """Every combination of a grid, once. A point with a row keeps its number in a larger grid."""

    def __init__(self, points: Sequence[GridPoint], ledger: Ledger) -> None:
        numbers = {row.point: row.trial for row in ledger.found.latest.values() if row.trial is not None}
        taken = set(numbers.values())
        free = (number for number in count() if number not in taken)
        proposals = [(numbers[each.id] if each.id in numbers else next(free), each) for each in points]
        for number, point in proposals:
            if point.id not in ledger.found.latest:  # it may have ended just when the search was killed
                ledger.adopt(point, number)
        missing = set(ledger.missing([point.id for point in points]))
        self._left = [(number, point) for number, point in proposals if point.id in missing]
        self._left.reverse()

    @property
    def has_more(self) -> bool:
        """Whether points were not begun."""
        return bool(self._left)

    def next(self) -> Proposal | None:
        """Returns the next point in the grid's order."""
        return self._left.pop() if self._left else None

    def prune(self, begun: Row, validation: int, value: float) -> str | None:
        """Returns None: a grid ends no trial."""
        return None

    def ended(self, row: Row) -> None:
        """Does nothing: the ledger has the row."""


class AskedPoints:
    """Points that Optuna asks for, each once; at most ``most`` trials, those of the ledger included."""

    def __init__(
        self, study: OptunaStudy, space: Space, fixed: Sequence[str], ledger: Ledger, *, most: int, pruner: str
    ) -> None:
        self._study, self._space, self._fixed, self._ledger = study, space, tuple(fixed), ledger
        self._most, self._pruner = most, pruner
        self._running: dict[str, int] = {}
        """Id of each point that runs -> number of its trial in Optuna's study."""
        self._is_tried = False
        """Whether Optuna asks for known points only."""
        self._again: set[str] = set()
        """Points that have a row and are run once more; their values wait in Optuna's queue."""
        taken = (row.trial for row in ledger.found.rows if row.trial is not None)
        self._numbers = count(max(taken, default=-1) + 1)
        self._keep_unfinished()
        for row in ledger.found.rows:
            curve = () if ledger.metric is None else read_curve(ledger.folder / row.folder, ledger.metric.name)
            finite = [point.value for point in curve if math.isfinite(point.value)]
            study.add(self._values(row.overrides), row.outcome, row.value, finite)
        for row in ledger.latest.values():
            if row.status in {"interrupted", *ledger.retry}:
                self._again.add(row.point)
                study.ask_later(self._values(row.overrides))

    def _keep_unfinished(self) -> None:
        """Writes the rows of trials that ended when the search was killed, and queues those that had not ended."""
        for path in sorted(self._ledger.folder.glob("*/run.json")):
            found = record_of(path.parent)
            if path.parent.name in self._ledger.latest or found is None:
                continue
            point = point_of(self._values(found.overrides), self._fixed)
            if point.id == path.parent.name and self._ledger.adopt(point, next(self._numbers)) is None:
                self._study.ask_later(point.values)

    def _values(self, overrides: Sequence[str]) -> dict[str, str]:
        typed = dict(text.partition("=")[::2] for text in overrides)
        return {axis: typed[axis] for axis in self._space if axis in typed}

    @property
    def has_more(self) -> bool:
        """Whether points are to be run again, or new ones are allowed and left."""
        number, points = len(self._ledger.latest.keys() | self._running.keys()), size(self._space)
        return bool(self._again) or (number < min(self._most, points or self._most) and not self._is_tried)

    def next(self) -> Proposal | None:
        """Returns an untried point; a point that Optuna asks for twice is answered with its row."""
        if not self.has_more:
            return None
        for _ in range(_MOST_REPEATS):
            asked, values = self._study.ask()
            point = point_of(values, self._fixed)
            if not self._is_taken(point.id):
                self._again.discard(point.id)
                self._running[point.id] = asked
                return next(self._numbers), point
            row = self._ledger.latest.get(point.id)
            self._study.end(asked, *(("failed", None) if row is None else (row.outcome, row.value)))
        self._is_tried = True
        return None

    def _is_taken(self, point: str) -> bool:
        """Returns whether a point runs, or has run and is not to be run again."""
        return point in self._running or (point in self._ledger.latest and point not in self._again)

    def prune(self, begun: Row, validation: int, value: float) -> str | None:
        """Returns the pruner's reason to end a trial."""
        if not self._study.report(self._running[begun.point], validation, value):
            return None
        return f"search.pruner={self._pruner} after validation {validation}"

    def ended(self, row: Row) -> None:
        """Gives Optuna the result; the ledger has it already."""
        self._study.end(self._running.pop(row.point), row.outcome, row.value)


Points = GridPoints | AskedPoints
"""Source of points."""
