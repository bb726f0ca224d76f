"""Finds the largest micro-batch that fits in at most six probes. Pure, so tests run it on cards of any size.

The memory of forward and backward is a line over the batch size. The memory of the optimizer step is flat. A card must
hold the larger of the two. A probe reports both, so the first sizes already show the line. A fit through the maximum
alone is misled by its flat part (other tools do that, and choose 76 where 55 fit).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from wellfed.units import show_gib

LIMIT_FRAC = 0.95
"""Share of the budget that a chosen size may need; the rest is for fragmentation and for batches that need more."""
GOOD_FRAC = 0.95
"""Share of the largest size that may fit which is good enough."""
EXACT_BELOW = 20
"""Size below which the largest itself is searched."""
AIM_FRAC = 0.975
"""Share of a large estimate that is tried: nearly as good, and it fits at the first try."""
MAX_PROBES = 6
PLATEAU_GAIN = 0.05
"""Relative gain in samples/s below which a size is on the plateau of one `PLATEAU_GROWTH` times smaller."""
PLATEAU_GROWTH = 1.5
SLOPES_AGREE = 0.05
GRANULE_BYTES = 2 * 2**20
"""Bytes that peaks are rounded to: the CUDA caching allocator requests segments of 2 MiB for small blocks."""
FAR_FRAC = 0.9
"""Largest share of the largest size from which a slope is taken: rounding hides shorter ones."""
LEAP = 64
"""Largest growth from one probe to the next if the peaks so far show no slope."""

StoppedBy = Literal["budget", "plateau", "target", "batch", "probes", "nothing fits"]


@dataclass(frozen=True)
class Peak:
    """Bytes of device memory at the worst moment of a step."""

    rest: int
    """Before the step: parameters, optimizer state, tables."""
    step: int
    """During forward and backward."""
    total: int
    """The larger of ``step`` and the optimizer's peak."""


@dataclass(frozen=True)
class Probe:
    """Measurements of one size; without a peak it ran out of memory."""

    size: int
    peak: Peak | None
    samples_per_s: float | None = None
    util_pct: float | None = None
    """Mean over the probe, 0..100; None without a reader."""


@dataclass(frozen=True)
class Fit:
    """The size to take, and why not a larger one."""

    size: int | None
    """None: not even one sample fits."""
    stopped_by: StoppedBy
    because: str
    probes: tuple[Probe, ...]
    """In the order they were run."""


@dataclass
class _Probed:
    """Conclusions from the probes so far."""

    max_size: int
    limit_bytes: float
    probes: list[Probe] = field(default_factory=list)

    def fits(self, probe: Probe) -> bool:
        return probe.peak is not None and probe.peak.total <= self.limit_bytes

    @property
    def fitting(self) -> list[Probe]:
        return sorted((probe for probe in self.probes if self.fits(probe)), key=lambda probe: probe.size)

    @property
    def lowest_failure(self) -> int:
        """The smallest size that is known not to fit; without one, ``max_size + 1``."""
        return min((probe.size for probe in self.probes if not self.fits(probe)), default=self.max_size + 1)

    def points(self) -> list[tuple[int, float]]:
        """Returns ``(size, bytes of forward and backward)`` by size, with what the allocator wastes."""
        return sorted((probe.size, float(probe.peak.step)) for probe in self.probes if probe.peak is not None)

    def slope(self) -> tuple[float, float, int]:
        """Returns the bytes at the largest size that fits, and their change and the distance to the nearest other."""
        largest, points = self.fitting[-1], self.points()
        here = next(at for size, at in points if size == largest.size)
        above = [point for point in points if point[0] > largest.size]
        below = [point for point in points if point[0] <= FAR_FRAC * largest.size] or points[:-1]
        size, there = above[0] if above else below[-1]
        return here, abs(there - here), abs(size - largest.size)

    def estimate(self) -> int:
        """Returns the largest size by the line through the two points that enclose the limit, or are closest to it.

        If the peaks show no slope, it is at most `LEAP` times a size that fits.
        """
        largest = self.fitting[-1]
        if len(self.points()) == 1:
            return max(2, self.safe())
        here, rise, interval = self.slope()
        size = largest.size + int((self.limit_bytes - here) / (max(rise, GRANULE_BYTES) / interval))
        return size if rise > GRANULE_BYTES else min(max(size, largest.size + 1), LEAP * largest.size)

    def most(self) -> float:
        """Returns the largest size that fits if rounding made both the peak and the slope a granule too large."""
        here, rise, interval = self.slope() if len(self.points()) > 1 else (0.0, 0.0, 1)
        if rise <= GRANULE_BYTES:
            return math.inf
        room = self.limit_bytes - (here - GRANULE_BYTES)
        return self.fitting[-1].size + int(room * interval / (rise - GRANULE_BYTES))

    def safe(self) -> int:
        """Returns a size that fits if the line begins at or above the memory in use before the step."""
        size, peak = self.fitting[-1].size, self.fitting[-1].peak
        assert peak is not None
        return int(size * (self.limit_bytes - peak.rest) / max(1.0, peak.step - peak.rest))

    def is_line(self) -> bool:
        """Returns whether two successive slopes agree, and rounding hides little of the second."""
        points = self.points()
        while len(points) > 3 and points[-2][0] > FAR_FRAC * points[-1][0]:
            del points[-2]
        if len(points) < 3:
            return False
        (a, at_a), (b, at_b), (c, at_c) = points[-3:]
        first, second = (at_b - at_a) / (b - a), (at_c - at_b) / (c - b)
        is_sure = at_c - at_b >= GRANULE_BYTES / SLOPES_AGREE
        return is_sure and abs(first - second) <= SLOPES_AGREE * second + GRANULE_BYTES / (b - a)


def search(
    probe: Callable[[int], Probe],
    *,
    max_size: int,
    budget_bytes: float,
    min_size: int = 1,
    target_util_pct: float | None = None,
    plateau_gain: float = PLATEAU_GAIN,
) -> Fit:
    """Probes sizes from 1 upwards until the budget, the plateau, the target or ``max_size`` stops it.

    Args:
        probe: runs steps of one size. A probe without a peak ran out of memory; other errors are raised.
        max_size: samples of a step on one device; more would change what is learned.
        min_size: the fewest samples that can run.
        target_util_pct: stops at the first size with this mean utilisation; needs probes that read it.
        plateau_gain: relative gain below which a size is on the plateau; 0 = consider memory alone.
    """
    found = _Probed(max_size, LIMIT_FRAC * budget_bytes)
    size: int | None = min(min_size, max_size)
    while size is not None:
        found.probes.append(probe(size))
        stop = _stopped_early(found, target_util_pct, plateau_gain)
        if stop is not None:
            return stop
        size = _next_size(found)
    return _at_budget(found)


def _stopped_early(found: _Probed, target_util_pct: float | None, plateau_gain: float) -> Fit | None:
    """Returns the result if the search ends before the budget is known; None to go on."""
    fitting, probes = found.fitting, tuple(found.probes)
    if not fitting:
        fit = "one sample fits" if probes[0].size == 1 else f"{probes[0].size} samples fit"
        return Fit(None, "nothing fits", f"not even {fit}", probes)
    if target_util_pct is not None:
        for one in fitting:
            if one.util_pct is not None and one.util_pct >= target_util_pct:
                because = f"{one.util_pct:.0f} % utilisation at {one.size}, and {target_util_pct:g} % was the target"
                return Fit(one.size, "target", because, probes)
    rates = [(probe.samples_per_s, probe.size) for probe in fitting if probe.samples_per_s]
    if plateau_gain > 0 and len(rates) > 1:
        enough = max(rates)[0] / (1 + plateau_gain)
        # The smallest size that is as fast.
        rate, size = next(one for one in rates if one[0] > enough)
        largest_rate, largest = rates[-1]
        if largest >= PLATEAU_GROWTH * size:
            gain = largest_rate / rate - 1
            because = f"{largest} samples at a time are {gain:+.1%} in samples/s over {size}"
            return Fit(size, "plateau", because, probes)
    if fitting[-1].size == found.max_size:
        because = f"the {found.max_size} samples of a step fit whole"
        return Fit(found.max_size, "batch", because, probes)
    return None


def _next_size(found: _Probed) -> int | None:
    """Returns the size to probe next; None if the largest that fits is known well enough, or probes are used up."""
    largest, failure = found.fitting[-1].size, found.lowest_failure
    num_left = MAX_PROBES - len(found.probes)
    if num_left == 0 or failure - largest <= 1:
        return None
    estimate, is_line = found.estimate(), found.is_line()
    upper, most = min(failure - 1, estimate), min(failure - 1, found.most())
    if largest >= most or (most >= EXACT_BELOW and largest >= GOOD_FRAC * most and is_line):
        return None
    out_of_memory_above = all(probe.peak is None for probe in found.probes if probe.size == failure)
    if failure <= found.max_size and estimate >= failure and out_of_memory_above:
        return largest + max(1, (failure - largest) // 2)  # the line predicted that it fits, so it is no line
    # If its two points differ by rounding alone, the estimate has taken the steepest slope that rounding may hide.
    if len(found.points()) == 1 or found.slope()[1] > GRANULE_BYTES:
        if not is_line and upper > 2 * largest and num_left > 1:  # most of the way, where the line can be seen
            upper = max(found.safe(), int(largest ** (1 / 3) * upper ** (2 / 3)))
        elif upper == estimate and upper >= EXACT_BELOW and AIM_FRAC * upper > largest + 1:
            good = math.ceil(GOOD_FRAC * min(most, 2 * upper)) if num_left > 1 else 0
            upper = max(int(AIM_FRAC * upper), min(upper, good))
    if upper <= largest:  # more may fit than the line predicts
        upper = (largest + int(min(most, 2 * largest)) + 1) // 2
    return min(max(upper, largest + 1), failure - 1)


def _at_budget(found: _Probed) -> Fit:
    largest, probes, failure = found.fitting[-1].size, tuple(found.probes), found.lowest_failure
    upper = min(failure - 1, found.estimate())
    # A slope from below is never too steep, so no more fits than it predicts. One from above may be.
    is_from_below = found.points()[-1][0] == largest
    is_known = found.is_line() or failure > found.max_size or (is_from_below and largest >= upper)
    most = min(failure - 1, found.most() if is_known else math.inf)
    if len(probes) == MAX_PROBES and largest < GOOD_FRAC * most:
        return Fit(largest, "probes", f"{MAX_PROBES} probes are used up; up to {most:.0f} may fit", probes)
    because = f"{show_gib(found.limit_bytes / 2**30)} ({LIMIT_FRAC:g} of the budget) hold about {upper} samples"
    return Fit(largest, "budget", because, probes)
