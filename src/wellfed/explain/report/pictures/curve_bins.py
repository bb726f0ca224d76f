"""Thins curves for pictures: some hundred bins with their mean, least and most, broken where nothing was read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wellfed.explain.diagnosis.run_tables import Series

MOST = 300
"""Points of a curve in a picture; more can't be told apart."""
_GAP = 6
"""Times the usual distance of readings: further apart there is a gap between them."""


@dataclass(frozen=True)
class Binned:
    """A curve of at most `MOST` points, and ``nan`` in its gaps."""

    x: Series
    mean: Series
    low: Series
    high: Series
    is_thinned: bool
    """Points stand for several readings each, so that least and most differ from the mean."""


def binned(x: Series, values: Series, lasts: Series | None = None) -> Binned:
    """The curve of ``values`` at ``x``, both ``[readings]``, in order; values that are not finite are left out.

    Args:
        lasts: the length of ``x`` that each value is about, where that differs.
    """
    there = np.isfinite(x) & np.isfinite(values)
    x, values = x[there], values[there]
    number = len(x)
    if number == 0:
        return Binned(x, values, values, values, False)
    gaps = _gaps(x, np.zeros(number) if lasts is None else lasts[there])
    first = np.unique(np.append(np.linspace(0, number, min(MOST, number), endpoint=False).astype(int), gaps))
    count = np.diff(np.append(first, number))
    found = [np.add.reduceat(x, first) / count, np.add.reduceat(values, first) / count]
    found += [np.minimum.reduceat(values, first), np.maximum.reduceat(values, first)]
    breaks = np.searchsorted(first, gaps)
    at, mean, low, high = (np.insert(curve, breaks, np.nan) for curve in found)
    return Binned(at, mean, low, high, number > MOST)


def _gaps(x: Series, lasts: Series) -> npt.NDArray[np.intp]:
    """Places of the readings that follow a gap."""
    steps = np.diff(x)
    if len(steps) < 2 or not np.median(steps) > 0:
        return np.empty(0, dtype=np.intp)
    found = 1 + np.flatnonzero(steps > _GAP * np.maximum(np.median(steps), lasts[1:]))
    return found if len(found) <= MOST else found[:0]  # this irregular, it has none
