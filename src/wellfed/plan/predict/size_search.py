"""Finds the largest micro-batch that fits in at most six probes. Pure, so tests run it for cards of any size.

Memory of forward and backward is linear in the batch size. Memory of the optimizer step is constant. A card must hold
the larger of the two. A probe reports both, so the first sizes already show the line. A fit through the maximum alone
would be misled by its flat part (76 instead of 55, as in other tools).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from wellfed.units import show_gib

LIMIT_FRAC = 0.95
"""Maximum share of the budget for a chosen size; the rest is for fragmentation and larger batches."""
GOOD_FRAC = 0.95
"""Sufficient share of the largest size that may fit."""
EXACT_BELOW = 20
"""Size below which the search is exact."""
AIM_FRAC = 0.975
"""Share of a large estimate to try: nearly as good, and likely to fit at once."""
MAX_PROBES = 6
PLATEAU_GAIN = 0.05
"""Minimum relative gain in samples/s over a size `PLATEAU_GROWTH` times smaller; below it, a size is on the plateau."""
PLATEAU_GROWTH = 1.5
SLOPES_AGREE = 0.05
GRANULE_BYTES = 2 * 2**20
"""Rounding of peaks in bytes; the CUDA caching allocator requests segments of 2 MiB for small blocks."""
FAR_FRAC = 0.9
"""Maximum ratio of the sizes that give a slope; rounding hides smaller steps."""
LEAP = 64
"""Maximum growth between probes while the peaks show no slope."""

StoppedBy = Literal["budget", "plateau", "batch", "probes", "nothing fits"]


@dataclass(frozen=True)
class Peak:
    """Bytes of device memory at the peak of a step."""

    rest: int
    """Bytes before the step: parameters, optimizer state, tables."""
    step: int
    """Bytes during forward and backward."""
    total: int
    """Maximum of ``step`` and the optimizer's peak."""


@dataclass(frozen=True)
class Probe:
    """Measurements of one size; no peak means out of memory."""

    size: int
    peak: Peak | None
    samples_per_s: float | None = None


@dataclass(frozen=True)
class Fit:
    """The size to use, and the reason for not using a larger one."""

    size: int | None
    """None = not even one sample fits."""
    stopped_by: StoppedBy
    because: str
    probes: tuple[Probe, ...]
    """In order of execution."""


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
        """Smallest size known not to fit; ``max_size + 1`` without one."""
        return min((probe.size for probe in self.probes if not self.fits(probe)), default=self.max_size + 1)

    def points(self) -> list[tuple[int, float]]:
        """Returns ``(size, bytes of forward and backward)`` by size, including the allocator's waste."""
        return sorted((probe.size, float(probe.peak.step)) for probe in self.probes if probe.peak is not None)

    def slope(self) -> tuple[float, float, int]:
        """Returns the bytes at the largest fitting size, their change to the nearest other size, and its distance."""
        largest, points = self.fitting[-1], self.points()
        here = next(at for size, at in points if size == largest.size)
        above = [point for point in points if point[0] > largest.size]
        below = [point for point in points if point[0] <= FAR_FRAC * largest.size] or points[:-1]
        size, there = above[0] if above else below[-1]
        return here, abs(there - here), abs(size - largest.size)

    def estimate(self) -> int:
        """Returns the largest size by the line through the two points around the limit, or closest to it.

        If the peaks show no slope, it is at most `LEAP` times a fitting size.
        """
        largest = self.fitting[-1]
        if len(self.points()) == 1:
            return max(2, self.safe())
        here, rise, interval = self.slope()
        size = largest.size + int((self.limit_bytes - here) / (max(rise, GRANULE_BYTES) / interval))
        return size if rise > GRANULE_BYTES else min(max(size, largest.size + 1), LEAP * largest.size)

    def most(self) -> float:
        """Returns the largest size that fits if rounding added a granule to both peak and slope."""
        here, rise, interval = self.slope() if len(self.points()) > 1 else (0.0, 0.0, 1)
        if rise <= GRANULE_BYTES:
            return math.inf
        room = self.limit_bytes - (here - GRANULE_BYTES)
        return self.fitting[-1].size + int(room * interval / (rise - GRANULE_BYTES))

    def safe(self) -> int:
        """Returns a size that fits if the line starts at or above the memory used before the step."""
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
    plateau_gain: float = PLATEAU_GAIN,
) -> Fit:
    """Probes sizes from 1 upwards until the budget, the plateau or ``max_size`` stops it.

    Args:
        probe: runs steps of one size. No peak means out of memory; other errors raise.
        max_size: samples per step on one device.
        min_size: fewest samples that can run.
        plateau_gain: relative gain below which a size is on the plateau; 0 = consider memory alone.
    """
    found = _Probed(max_size, LIMIT_FRAC * budget_bytes)
    size: int | None = min(min_size, max_size)
    while size is not None:
        found.probes.append(probe(size))
        stop = _stopped_early(found, plateau_gain)
        if stop is not None:
            return stop
        size = _next_size(found)
    return _at_budget(found)


def _stopped_early(found: _Probed, plateau_gain: float) -> Fit | None:
    """Returns the result if the search ends before the limit is known; None to continue."""
    fitting, probes = found.fitting, tuple(found.probes)
    if not fitting:
        fit = "one sample fits" if probes[0].size == 1 else f"{probes[0].size} samples fit"
        return Fit(None, "nothing fits", f"not even {fit}", probes)
    rates = [(probe.samples_per_s, probe.size) for probe in fitting if probe.samples_per_s]
    if plateau_gain > 0 and len(rates) > 1:
        enough = max(rates)[0] / (1 + plateau_gain)
        # the smallest size that is as fast
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
    """Returns the next size to probe; None if the largest is known well enough, or no probes are left."""
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
        return largest + max(
            1, (failure - largest) // 2
        )  # the prediction of a fit was wrong, so the peaks are not linear
    # If two points differ by rounding alone, the estimate used the steepest slope that rounding can hide.
    if len(found.points()) == 1 or found.slope()[1] > GRANULE_BYTES:
        if not is_line and upper > 2 * largest and num_left > 1:  # most of the way, where the line shows
            upper = max(found.safe(), int(largest ** (1 / 3) * upper ** (2 / 3)))
        elif upper == estimate and upper >= EXACT_BELOW and AIM_FRAC * upper > largest + 1:
            good = math.ceil(GOOD_FRAC * min(most, 2 * upper)) if num_left > 1 else 0
            upper = max(int(AIM_FRAC * upper), min(upper, good))
    if upper <= largest:  # more may fit than predicted
        upper = (largest + int(min(most, 2 * largest)) + 1) // 2
    return min(max(upper, largest + 1), failure - 1)


def _at_budget(found: _Probed) -> Fit:
    largest, probes, failure = found.fitting[-1].size, tuple(found.probes), found.lowest_failure
    upper = min(failure - 1, found.estimate())
    # A slope from below is never too steep, so it gives an upper bound. A slope from above may be too steep.
    is_from_below = found.points()[-1][0] == largest
    is_known = found.is_line() or failure > found.max_size or (is_from_below and largest >= upper)
    most = min(failure - 1, found.most() if is_known else math.inf)
    if len(probes) == MAX_PROBES and largest < GOOD_FRAC * most:
        return Fit(largest, "probes", f"{MAX_PROBES} probes are used up; up to {most:.0f} may fit", probes)
    because = f"{show_gib(found.limit_bytes / 2**30)} ({LIMIT_FRAC:g} of the budget) hold about {upper} samples"
    return Fit(largest, "budget", because, probes)
