"""Chooses which micro-batches to measure, so that a line between any two of them is near the truth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from wellfed.footprint.footprint import Point, on_curve, whole_pass

MOST_POINTS = 9
MOST_S = 15.0
"""Seconds after which no further point is begun: a line over a wide gap is too high, never too low."""
NEAR_FRAC = 0.01
"""Of the whole peak: by no more may a line between two points be off."""


def curve(point: Callable[[int], Point], samples: int, *, lowest: int = 1, beside: int = 0) -> list[Point]:
    """Points from ``lowest`` to ``samples``, by rising micro-batch.

    A peak is the highest of many moments, each a line of the micro-batch, so its curve bends upwards only: in a gap it
    lies between the line that joins the ends and the lines that come in from either side. Where these leave most
    doubt, at their crossing, the next point is measured. With few bends that is where the bend is.

    Args:
        beside: bytes that are there whatever the micro-batch.
    """
    first = sorted({min(lowest, samples), max(samples // 2, min(lowest, samples)), samples})
    began_s = time.monotonic()
    points = [point(size) for size in first]
    while len(points) < MOST_POINTS and time.monotonic() - began_s < MOST_S:
        doubts = [_doubt(points, gap, value, beside) for gap in range(len(points) - 1) for value in _VALUES]
        frac, size = max(doubts, default=(0.0, 0))
        if frac <= NEAR_FRAC:
            break
        points = sorted([*points, point(size)], key=lambda each: each.micro_batch)
    return points


_VALUES: tuple[Callable[[Point], int], ...] = (whole_pass, lambda point: point.activations_after)


def _doubt(points: Sequence[Point], gap: int, value: Callable[[Point], int], beside: int) -> tuple[float, int]:
    """By how much, as a share of the peak, the line over a gap may be off, and where."""
    low, high = points[gap], points[gap + 1]
    if high.micro_batch - low.micro_batch < 2:
        return 0.0, 0
    # Memory never falls with the micro-batch; beyond the last point nothing is known.
    before = _slope(points[gap - 1], low, value) if gap else 0.0
    over = _slope(low, high, value)
    if gap + 2 < len(points):
        after = _slope(high, points[gap + 2], value)
        bend = (over - before) / (after - before) if after > before else 0.0
        # The crossing of both lines, as a share of the gap seen from its end.
        size = high.micro_batch - bend * (high.micro_batch - low.micro_batch)
    else:
        size = (low.micro_batch + high.micro_batch) / 2
    inside = min(max(round(size), low.micro_batch + 1), high.micro_batch - 1)
    error = (over - before) * (size - low.micro_batch)
    return error / (beside + on_curve([low, high], inside, value)), inside


def _slope(low: Point, high: Point, value: Callable[[Point], int]) -> float:
    return (value(high) - value(low)) / (high.micro_batch - low.micro_batch)
