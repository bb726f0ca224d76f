"""Averages the runs of a point and computes the interval of the mean.

Two things make a figure uncertain. Within a run, steps differ: the run has a 95 % interval of its own steps. Between
runs of the same settings, memory layout, clocks and neighbours differ: that noise is learned from the points that were
measured more than once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from wellfed.observe.timing.interval import student_t


@dataclass(frozen=True)
class MeasuredRun:
    """One measurement of a point."""

    figure: float
    """> 0; samples/s, or another that ranks."""
    half_width: float | None
    """Half width of its own 95 % interval; None = it has none."""


@dataclass(frozen=True)
class Noise:
    """Noise between runs of the same settings."""

    relative_sd: float
    """Standard deviation of one run, as a fraction of its figure."""
    degrees: int
    """Degrees of freedom, >= 1."""

    def half_width(self, runs: int) -> float:
        """Returns the half width of the 95 % interval of a mean over ``runs`` runs, as a fraction of it."""
        return student_t(self.degrees) * self.relative_sd / math.sqrt(runs)


def pooled_noise(points: Iterable[Sequence[MeasuredRun]]) -> Noise | None:
    """Returns the noise of one run, pooled within points over logarithms; None if no point was measured twice.

    All points share it. Three runs of one point alone would give an interval that is far too wide or too narrow by
    chance.
    """
    squares, degrees = 0.0, 0
    for runs in points:
        if len(runs) > 1:
            squares += stdev(math.log(run.figure) for run in runs) ** 2 * (len(runs) - 1)
            degrees += len(runs) - 1
    return Noise(math.sqrt(squares / degrees), degrees) if degrees else None


def mean_with_interval(runs: Sequence[MeasuredRun], noise: Noise | None) -> tuple[float, tuple[float, float] | None]:
    """Returns the mean of one point and its 95 % interval; None without either half width.

    The half width is the larger of two, each for a mean over n runs: Student's t x noise between runs / sqrt(n), which
    all points share, and that of this point's own runs.
    """
    mean = fmean(run.figure for run in runs)
    halves = [_own_half_width(runs), None if noise is None else mean * noise.half_width(len(runs))]
    half = max((half for half in halves if half is not None), default=None)
    return mean, None if half is None else (max(0.0, mean - half), mean + half)


def _own_half_width(runs: Sequence[MeasuredRun]) -> float | None:
    """Returns the half width of the mean by one point's own runs.

    It is the root of the sum of their squared half widths / n. From three runs on it is Student's t of their
    differences where that is less: steps that drift give too wide an interval to runs that agree.
    """
    known = [run.half_width for run in runs if run.half_width is not None]
    halves = [math.hypot(*known) / len(runs)] if len(known) == len(runs) else []
    if halves and len(runs) > 2:
        spread = stdev(run.figure for run in runs)
        halves.append(student_t(len(runs) - 1) * spread / math.sqrt(len(runs)))
    return min(halves, default=None)
