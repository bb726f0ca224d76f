"""Says which point a search tries next: the next of a grid, or what Optuna asks for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wellfed.study.search.search_rows import SearchRow
from wellfed.study.search.space import Space, grid_values, size
from wellfed.study.sweep.grid import Grid, GridPoint, point_id
from wellfed.study.trials.search_ledger import SearchLedger

if TYPE_CHECKING:
    from wellfed.study.search.study import AskedTrial, Study

_MOST_LISTED = 10_000
"""Points of a space that are listed to find one that was not tried."""


@dataclass(frozen=True)
class Proposal:
    """A point to be tried."""

    number: int
    """Of the trial."""
    point: GridPoint
    asked: AskedTrial | None = None
    """Of Optuna."""


class Points(Protocol):
    """Where points come from."""

    @property
    def has_more(self) -> bool:
        """Something is left to try."""

    def next(self) -> Proposal | None:
        """What to try now; None = nothing, at least while those that run have not ended."""

    def judge(self, proposal: Proposal, validation: int, value: float) -> str | None:
        """Why a trial is to end after a validation; None = it goes on."""

    def ended(self, proposal: Proposal, row: SearchRow) -> None:
        """What became of it."""


class GridPoints:
    """Every combination once."""

    def __init__(self, points: Sequence[GridPoint], ledger: SearchLedger) -> None:
        for number, point in enumerate(points):
            if point.id not in ledger.latest():  # it may have ended just when the search was killed
                ledger.adopt(point, number)
        missing = set(ledger.missing([point.id for point in points]))
        self._left = [Proposal(number, point) for number, point in enumerate(points) if point.id in missing]
        self._left.reverse()

    @property
    def has_more(self) -> bool:
        """Points that were not begun."""
        return bool(self._left)

    def next(self) -> Proposal | None:
        """In the grid's order."""
        return self._left.pop() if self._left else None

    def judge(self, proposal: Proposal, validation: int, value: float) -> str | None:
        """All train to their end."""
        return None

    def ended(self, proposal: Proposal, row: SearchRow) -> None:
        """The ledger has it."""


class AskedPoints:
    """What Optuna asks for, each point once; ``most`` trials in all, those of the ledger included."""

    def __init__(
        self, study: Study, space: Space, fixed: Sequence[str], ledger: SearchLedger, *, most: int, pruner: str
    ) -> None:
        self._study, self._space, self._fixed, self._ledger = study, space, tuple(fixed), ledger
        self._most, self._pruner = most, pruner
        self._running: dict[str, Proposal] = {}
        self._again: set[str] = set()
        """Points that have a row and are to be run once more; Optuna has their values waiting."""
        # By both: a journal that was removed counts its trials from 0 once more.
        by_trial = {(row.trial, row.point): row for row in ledger.rows}
        for asked in study.unfinished():
            proposal = self._proposal(asked)
            row = by_trial.get((asked.number, proposal.point.id)) or ledger.adopt(proposal.point, asked.number)
            if row is None:
                study.give_up(asked)
            else:
                self._tell(asked, row)
        for values in map(self._values, ledger.to_retry()):
            self._again.add(self._point(values).id)
            study.ask_later(values)

    @property
    def has_more(self) -> bool:
        """Those to be run again, and new ones as long as there may be more and are."""
        number = len(self._ledger.latest().keys() | self._running.keys())
        return bool(self._again) or (number < self._most and self._untried() != [])

    def next(self) -> Proposal | None:
        """A point that was not tried yet; one that Optuna asks for twice is told what is known of it."""
        if not self.has_more:
            return None
        known, untried = self._ledger.latest(), self._untried()
        proposal = self._proposal(self._study.ask())
        while self._is_taken(proposal.point.id):
            assert proposal.asked is not None
            if proposal.point.id in known:
                self._tell(proposal.asked, known[proposal.point.id])
            else:
                self._study.fail(proposal.asked)
            if untried:  # once: what else waits in Optuna comes before it
                self._study.ask_later(random.Random(proposal.number).choice(untried))
                untried = None
            proposal = self._proposal(self._study.ask())
        self._again.discard(proposal.point.id)
        self._running[proposal.point.id] = proposal
        return proposal

    def _is_taken(self, point: str) -> bool:
        """It runs, or has run and is not to be run again."""
        return point in self._running or (point in self._ledger.latest() and point not in self._again)

    def judge(self, proposal: Proposal, validation: int, value: float) -> str | None:
        """What the pruner says."""
        if not self._study.report(proposal.number, validation, value):
            return None
        return f"search.pruner={self._pruner} after validation {validation}"

    def ended(self, proposal: Proposal, row: SearchRow) -> None:
        """Told to Optuna; the ledger has it already."""
        self._running.pop(proposal.point.id, None)
        assert proposal.asked is not None
        self._tell(proposal.asked, row)

    def _tell(self, asked: AskedTrial, row: SearchRow) -> None:
        if row.outcome == "complete" and row.value is not None:
            self._study.complete(asked, row.value)
        elif row.outcome == "pruned":
            self._study.prune(asked)
        else:
            self._study.fail(asked)

    def _proposal(self, asked: AskedTrial) -> Proposal:
        return Proposal(asked.number, self._point(asked.values), asked)

    def _point(self, values: dict[str, str]) -> GridPoint:
        overrides = (*self._fixed, *(f"{axis}={value}" for axis, value in values.items()))
        return GridPoint(point_id(overrides), values, overrides)

    def _values(self, row: SearchRow) -> dict[str, str]:
        typed = dict(text.partition("=")[::2] for text in row.overrides)
        return {axis: typed[axis] for axis in self._space}

    def _untried(self) -> list[dict[str, str]] | None:
        """Values of all points that have neither a row nor run; None where the space is too large to list."""
        number = size(self._space)
        if number is None or number > _MOST_LISTED:
            return None
        taken = {*self._ledger.latest(), *self._running}
        points = Grid(grid_values(self._space), self._fixed).points()
        return [dict(point.values) for point in points if point.id not in taken]
