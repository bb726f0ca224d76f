"""How fast a point is, and how sure that is: one measurement or several, and the noise between runs.

Two things make a rate uncertain. Within a run: steps differ; each run tells it as the 95 % interval of its own steps.
Between runs: the same settings started again find other neighbours, another heap, another clock; one run can't see it,
so it is learned from the points that were measured more than once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from wellfed.timing.interval import student_t_975


@dataclass(frozen=True)
class Run:
    """One measurement of a point."""

    rate: float
    """Samples/s, > 0."""
    half_width: float | None
    """Of its own 95 % interval, samples/s; None = too few steps to have one."""


@dataclass(frozen=True)
class Noise:
    """Between runs of the same settings."""

    relative_sd: float
    """Of one run, as a fraction of its rate."""
    degrees: int
    """Of freedom, >= 1."""

    def half_width(self, runs: int) -> float:
        """Of the 95 % interval of a mean over so many runs, as a fraction of it."""
        return student_t_975(self.degrees) * self.relative_sd / math.sqrt(runs)


def pooled_noise(points: Iterable[Sequence[Run]]) -> Noise | None:
    """The relative standard deviation of one run, pooled within points over log rates; None if no point was measured
    twice.

    All points share it: three runs of one point alone would give an interval of several times the truth, or of nearly
    nothing, by chance.
    """
    squares, degrees = 0.0, 0
    for runs in points:
        if len(runs) > 1:
            squares += stdev(math.log(run.rate) for run in runs) ** 2 * (len(runs) - 1)
            degrees += len(runs) - 1
    return Noise(math.sqrt(squares / degrees), degrees) if degrees else None


def rate_with_interval(runs: Sequence[Run], noise: Noise | None) -> tuple[float, tuple[float, float] | None]:
    """Mean rate of one point and its 95 % interval, samples/s.

    The half width is the larger of two, each for a mean over n runs: Student's t of the noise between runs x its
    deviation / sqrt(n), which all points share, and what this point's runs tell. For a point that was measured once
    these are the noise between runs and the interval of the run. What is not known is left out; with neither there is
    no interval.
    """
    rate = fmean(run.rate for run in runs)
    own = _own_half_width(runs)
    halves = [] if own is None else [own]
    if noise is not None:
        halves.append(rate * noise.half_width(len(runs)))
    if not halves:
        return rate, None
    return rate, (max(0.0, rate - max(halves)), rate + max(halves))


def _own_half_width(runs: Sequence[Run]) -> float | None:
    """What one point's runs tell of their mean, samples/s.

    Root of the sum of their squared half widths / n; or, from three runs on, Student's t of how they differ where that
    is less: few steps that drift have an interval of any width, and runs that agree all the same say more.
    """
    known = [run.half_width for run in runs if run.half_width is not None]
    halves = [math.hypot(*known) / len(runs)] if len(known) == len(runs) else []
    if halves and len(runs) > 2:
        spread = stdev(run.rate for run in runs)
        halves.append(student_t_975(len(runs) - 1) * spread / math.sqrt(len(runs)))
    return min(halves, default=None)
