"""Averages the runs of a point and tells how sure the mean is.

Two things make a figure uncertain. Within a run: steps differ; a run tells it as the 95 % interval of its own steps.
Between runs: the same settings started again find other neighbours, another heap, another clock; one run can't see it,
so it is learned from the points that were measured more than once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from wellfed.observe.timing.interval import student_t_975


@dataclass(frozen=True)
class MeasuredRun:
    """One measurement of a point."""

    figure: float
    """> 0; samples/s, or another that ranks."""
    half_width: float | None
    """Of its own 95 % interval; None = it tells none."""


@dataclass(frozen=True)
class Noise:
    """Between runs of the same settings."""

    relative_sd: float
    """Of one run, as a fraction of its figure."""
    degrees: int
    """Of freedom, >= 1."""

    def half_width(self, runs: int) -> float:
        """Of the 95 % interval of a mean over so many runs, as a fraction of it."""
        return student_t_975(self.degrees) * self.relative_sd / math.sqrt(runs)


def pooled_noise(points: Iterable[Sequence[MeasuredRun]]) -> Noise | None:
    """The relative standard deviation of one run, pooled within points over logarithms; None if no point was measured
    twice.

    All points share it: three runs of one point alone would give an interval of several times the truth, or of nearly
    nothing, by chance.
    """
    squares, degrees = 0.0, 0
    for runs in points:
        if len(runs) > 1:
            squares += stdev(math.log(run.figure) for run in runs) ** 2 * (len(runs) - 1)
            degrees += len(runs) - 1
    return Noise(math.sqrt(squares / degrees), degrees) if degrees else None


def mean_with_interval(runs: Sequence[MeasuredRun], noise: Noise | None) -> tuple[float, tuple[float, float] | None]:
    """Mean of one point and its 95 % interval.

    The half width is the larger of two, each for a mean over n runs: Student's t of the noise between runs x its
    deviation / sqrt(n), which all points share, and what this point's runs tell. For a point that was measured once
    these are the noise between runs and the interval of the run. What is not known is left out; with neither there is
    no interval.
    """
    mean = fmean(run.figure for run in runs)
    halves = [_own_half_width(runs), None if noise is None else mean * noise.half_width(len(runs))]
    half = max((half for half in halves if half is not None), default=None)
    return mean, None if half is None else (max(0.0, mean - half), mean + half)


def _own_half_width(runs: Sequence[MeasuredRun]) -> float | None:
    """What one point's runs tell of their mean.

    Root of the sum of their squared half widths / n; or, from three runs on, Student's t of how they differ where that
    is less: few steps that drift have an interval of any width, and runs that agree all the same say more.
    """
    known = [run.half_width for run in runs if run.half_width is not None]
    halves = [math.hypot(*known) / len(runs)] if len(known) == len(runs) else []
    if halves and len(runs) > 2:
        spread = stdev(run.figure for run in runs)
        halves.append(student_t_975(len(runs) - 1) * spread / math.sqrt(len(runs)))
    return min(halves, default=None)
