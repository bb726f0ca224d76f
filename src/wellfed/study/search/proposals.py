"""Proposes the points of a search: the next of a grid, or what Optuna asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from wellfed.study.ledger import Ledger
from wellfed.study.points.grid import GridPoint, point_of
from wellfed.study.points.space import Space, size
from wellfed.study.row import Row

if TYPE_CHECKING:
    from wellfed.study.points.optuna_study import AskedTrial, OptunaStudy

_MOST_REPEATS = 200
"""Known points that Optuna may ask for in a row before the space counts as tried."""


@dataclass(frozen=True)
class Proposal:
    """A point to be tried."""

    number: int
    """Number of the trial."""
    point: GridPoint


class GridPoints:
    """Every combination of a grid, once. A point with a row keeps its number in a larger grid."""

    def __init__(self, points: Sequence[GridPoint], ledger: Ledger) -> None:
        numbers = {row.point: row.trial for row in ledger.found.latest.values() if row.trial is not None}
        taken = set(numbers.values())
        free = (number for number in count() if number not in taken)
        proposals = [Proposal(numbers[each.id] if each.id in numbers else next(free), each) for each in points]
        for proposal in proposals:
            if proposal.point.id not in ledger.found.latest:  # it may have ended just when the search was killed
                ledger.adopt(proposal.point, proposal.number)
        missing = set(ledger.missing([point.id for point in points]))
        self._left = [proposal for proposal in proposals if proposal.point.id in missing]
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
        self._running: set[str] = set()
        self._is_tried = False
        """Whether Optuna asks for known points only."""
        self._again: set[str] = set()
        """Points that have a row and are run once more; their values wait in Optuna's queue."""
        # By both: after the journal was removed, trials are counted from 0 again.
        by_trial = {(row.trial, row.point): row for row in ledger.found.rows}
        for asked in study.unfinished():
            proposal = self._proposal(asked)
            row = by_trial.get((asked.number, proposal.point.id)) or ledger.adopt(proposal.point, asked.number)
            if row is None:
                study.give_up(asked)
            else:
                self._study.end(asked.number, row.outcome, row.value)
        for row in ledger.latest.values():
            if row.status in {"interrupted", *ledger.retry}:
                typed = dict(text.partition("=")[::2] for text in row.overrides)
                values = {axis: typed[axis] for axis in space}
                self._again.add(point_of(values, self._fixed).id)
                study.ask_later(values)

    @property
    def has_more(self) -> bool:
        """Whether points are to be run again, or new ones are allowed and left."""
        number, points = len(self._ledger.latest.keys() | self._running), size(self._space)
        return bool(self._again) or (number < min(self._most, points or self._most) and not self._is_tried)

    def next(self) -> Proposal | None:
        """Returns an untried point; a point that Optuna asks for twice is answered with its row."""
        if not self.has_more:
            return None
        proposal = self._proposal(self._study.ask())
        repeats = 0
        while self._is_taken(proposal.point.id):
            row = self._ledger.latest.get(proposal.point.id)
            self._study.end(proposal.number, *(("failed", None) if row is None else (row.outcome, row.value)))
            if (repeats := repeats + 1) == _MOST_REPEATS:
                self._is_tried = True
                return None
            proposal = self._proposal(self._study.ask())
        self._again.discard(proposal.point.id)
        self._running.add(proposal.point.id)
        return proposal

    def _is_taken(self, point: str) -> bool:
        """Returns whether a point runs, or has run and is not to be run again."""
        return point in self._running or (point in self._ledger.latest and point not in self._again)

    def prune(self, begun: Row, validation: int, value: float) -> str | None:
        """Returns the pruner's reason to end a trial."""
        if begun.trial is None or not self._study.report(begun.trial, validation, value):
            return None
        return f"search.pruner={self._pruner} after validation {validation}"

    def ended(self, row: Row) -> None:
        """Gives Optuna the result; the ledger has it already."""
        assert row.trial is not None
        self._running.discard(row.point)
        self._study.end(row.trial, row.outcome, row.value)

    def _proposal(self, asked: AskedTrial) -> Proposal:
        return Proposal(asked.number, point_of(asked.values, self._fixed))


Points = GridPoints | AskedPoints
"""Source of points."""
