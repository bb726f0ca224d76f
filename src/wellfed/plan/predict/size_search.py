"""Finds the largest micro-batch that fits in a few probes. Pure, so tests run it for cards of any size.

Memory of forward and backward is linear in the batch size. Memory of the optimizer step is constant. A card must hold
the larger of the two. A probe reports both, so two small sizes show the line, and a third checks its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from wellfed.units import MIB, show_gib

LIMIT_FRAC = 0.95
"""Maximum share of the budget for a chosen size; the rest is for fragmentation and larger batches."""
GOOD_FRAC = 0.93
"""Sufficient share of the size at which the line ends."""
AIM_FRAC = 0.975
"""Share of that size to try: nearly as good, and likely to fit at once."""
MAX_PROBES = 6
FIRST_SIZE = 2
GROWTH, LEAP = 4, 64
"""Growth from the first probe to the second, and maximum growth while the peaks show no line."""
GRANULE_BYTES = 2 * MIB
"""Rounding of peaks in bytes; the CUDA caching allocator requests segments of 2 MiB for small blocks."""


@dataclass(frozen=True)
class Peak:
    """Bytes of device memory at the peak of a step."""

    step: int
    """Bytes during forward and backward."""
    total: int
    """Maximum of ``step`` and the optimizer's peak."""


@dataclass(frozen=True)
class Probe:
    """Measurement of one size; no peak means out of memory."""

    size: int
    peak: Peak | None


@dataclass(frozen=True)
class Fit:
    """The size to use, and the reason for not using a larger one."""

    size: int | None
    """None = not even one sample fits."""
    stopped_by: Literal["budget", "batch", "nothing fits"]
    because: str
    probes: tuple[Probe, ...]
    """In order of execution."""


def search(probe: Callable[[int], Probe], *, max_size: int, budget_bytes: float, min_size: int = 1) -> Fit:
    """Probes two small sizes, then the end of the line through them, until the budget or ``max_size`` stops it.

    Args:
        probe: runs steps of one size. No peak means out of memory; other errors raise.
        max_size: samples per step on one device.
        min_size: fewest samples that can run.
    """
    limit = LIMIT_FRAC * budget_bytes
    probes: list[Probe] = []
    largest, too_large = 0, max_size + 1
    size: int | None = min(max(FIRST_SIZE, min_size), max_size)
    while size is not None and len(probes) < MAX_PROBES:
        done = probe(size)
        probes.append(done)
        if done.peak is not None and done.peak.total <= limit:
            largest = size
        else:
            too_large = size
        size = _next_size(probes, largest, too_large, min_size, limit)
    if not largest:
        fit = "one sample fits" if min_size == 1 else f"{min_size} samples fit"
        return Fit(None, "nothing fits", f"not even {fit}", tuple(probes))
    if largest == max_size:
        return Fit(largest, "batch", f"the {largest} samples of a step fit whole", tuple(probes))
    end = min(too_large - 1, max(largest, _end_of_line(probes, largest, limit)))
    hold = f"{show_gib(limit / 2**30)} ({LIMIT_FRAC:g} of the budget) hold about {end} samples"
    return Fit(largest, "budget", hold, tuple(probes))


def _next_size(probes: Sequence[Probe], largest: int, too_large: int, min_size: int, limit: float) -> int | None:
    """Returns the next size to probe; None if the largest is known well enough."""
    if not largest:
        return min_size if too_large > min_size else None
    if too_large - largest <= 1:
        return None
    if len(probes) == 1:
        return min(GROWTH * largest, too_large - 1)
    end = _end_of_line(probes, largest, limit)
    if end >= too_large:  # memory ran out below the end of the line
        return (largest + too_large) // 2
    if largest >= GOOD_FRAC * end:
        return None
    return min(max(largest + 1, int(AIM_FRAC * end)), too_large - 1)


def _end_of_line(probes: Sequence[Probe], largest: int, limit: float) -> int:
    """Returns the size at which the line through the two sizes around the limit reaches it.

    Without a line, it is `LEAP` times the largest.
    """
    points = sorted((probe.size, probe.peak.step) for probe in probes if probe.peak is not None)
    above = [point for point in points if point[0] > largest][:1]
    around = ([point for point in points if point[0] <= largest] + above)[-2:]
    rise = around[-1][1] - around[0][1]
    if rise <= GRANULE_BYTES:  # hidden by rounding, or there is one point
        return LEAP * largest
    (low, at_low), (high, _) = around
    return low + int((limit - at_low) * (high - low) / rise)
