"""Simulated cards, and how other tools look for a batch size on them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from wellfed.plan.predict.size_search import GRANULE_BYTES, LIMIT_FRAC, Peak, Probe

GIB = 2**30


@dataclass
class Card:
    """Peak memory is flat while the optimizer's part is the peak, then a line over the size, rounded to segments."""

    budget: int
    rest: int
    fixed: int
    """Bytes of forward and backward that do not depend on the size."""
    optimizer: int
    """Bytes of the optimizer's part, above ``rest``."""
    per_sample: float
    tells_apart: bool = True
    tried: list[int] = field(default_factory=list)

    def needs(self, size: int, more: float = 1.0) -> Peak:
        step = _rounded(self.rest + (self.fixed + self.per_sample * size) * more)
        total = max(step, _rounded(self.rest + self.optimizer))
        return Peak(step if self.tells_apart else total, total)

    def probe(self, size: int) -> Probe:
        self.tried.append(size)
        peak = self.needs(size)
        return Probe(size, peak if peak.total <= self.budget else None)

    def fits(self, size: int) -> bool:
        return self.needs(size).total <= LIMIT_FRAC * self.budget

    def largest(self) -> int:
        low, high = 0, 1
        while self.fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low


def _rounded(size: float) -> int:
    return -int(-size // GRANULE_BYTES) * GRANULE_BYTES


def card_of(uniform: Callable[[float, float], float], *, tells_apart: bool = True) -> Card:
    """A card of 2 to 140 GiB on which 1 to 20,000 samples fit; ``uniform`` draws from an interval."""
    budget = int(uniform(2, 140) * GIB)
    limit = LIMIT_FRAC * budget
    rest = int(uniform(0.01, 0.7) * limit)
    fixed = int(uniform(0.0, 0.6) * (limit - rest))
    optimizer = int(uniform(0.0, 0.98) * (limit - rest))
    largest = round(10 ** uniform(0, 4.3))
    room = limit - rest - fixed
    return Card(budget, rest, fixed, optimizer, room / (largest + uniform(0.01, 0.99)), tells_apart=tells_apart)


@st.composite
def cards(draw, tells_apart=True):
    """Cards for property tests."""
    return card_of(lambda low, high: draw(st.floats(low, high)), tells_apart=tells_apart)
