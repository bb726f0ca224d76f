"""Proposes the points of a search: what every source of points does, and the next of a grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count

from wellfed.study.points.grid import GridPoint
from wellfed.study.rows import Kept, Row

Proposal = tuple[int, GridPoint]
"""Number of a trial and the point to be tried."""


class Points(ABC):
    """Source of points."""

    @property
    @abstractmethod
    def has_more(self) -> bool:
        """Whether points are left to begin."""

    @abstractmethod
    def next(self) -> Proposal | None:
        """Returns the next point; None if there is none."""

    def prune(self, point: GridPoint, validation: int, value: float) -> str | None:
        """Returns the reason to end a trial after a validation; None to go on."""
        return None

    def ended(self, row: Row) -> None:  # noqa: B027  a grid learns nothing
        """Takes the result of a trial, which is in its folder already."""


class GridPoints(Points):
    """Every combination of a grid, once. A point with a row keeps its number in a larger grid."""

    def __init__(self, points: Sequence[GridPoint], kept: Kept) -> None:
        numbers = {row.point: row.trial for row in kept.found.latest.values() if row.trial is not None}
        taken = set(numbers.values())
        free = (number for number in count() if number not in taken)
        proposals = [(numbers[each.id] if each.id in numbers else next(free), each) for each in points]
        missing = set(kept.missing([point.id for point in points]))
        self._left = [(number, point) for number, point in proposals if point.id in missing]
        self._left.reverse()

    @property
    def has_more(self) -> bool:
        """Whether points were not begun."""
        return bool(self._left)

    def next(self) -> Proposal | None:
        """Returns the next point in the grid's order."""
        return self._left.pop() if self._left else None
