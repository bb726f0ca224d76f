"""Says whether a number lies within its limits, and the limits in words."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Limits of a number; null passes where the schema allows it."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a finite ``value`` lies within; NaN and infinity never do."""
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def legal_value(self, like: float) -> str:
        """A value within, as it is typed: a whole number where ``like`` is one."""
        if self.at_least is not None:
            return _show(self.at_least)
        return _show(1 if isinstance(like, int) or self.at_most is None else self.at_most)

    def __str__(self) -> str:
        limits = ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
        return " and ".join(f"{sign} {_show(limit)}" for sign, limit in limits if limit is not None)


def _show(number: float) -> str:
    return "2**63" if number == 2**63 else f"{number:g}"
