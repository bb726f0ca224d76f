"""Holds what the pictures of a run share: thinned curves, scales, and readings by GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import ChartCurve, Colour
from wellfed.explain.report.run_lines import MOST_GPUS
from wellfed.observe.telemetry.machines import HOST, is_host
from wellfed.units import counted

PERIODS = 6
"""Periods drawn of a swing that is too short for the picture of the whole run."""
MOST = 300
"""Maximum points of a curve in a picture; more are indistinguishable."""
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

    def curve(self, name: str, colour: Colour) -> ChartCurve:
        """Returns the mean, with the range where a point stands for several readings."""
        low, high = (self.low, self.high) if self.is_thinned else (None, None)
        return ChartCurve(name, colour, self.x, self.mean, low, high)


def of_many(number: int, noun: str) -> str:
    """Returns the caption of a curve of ``number`` readings."""
    if number <= MOST:
        return f"{counted(number, noun)[0].upper()}{counted(number, noun)[1:]}."
    return f"{counted(number, noun)}: mean and range of those that lie together."


def of_gpus(evidence: Evidence, name: str) -> dict[int, tuple[Series, Series]]:
    """Returns times and readings of a figure in every phase of the run, by GPU."""
    return readings(evidence.watched, name, [gpu for gpu in sorted(evidence.watched) if not is_host(gpu)])


def the_most(
    curves: Mapping[int, tuple[Series, Series]], by: Callable[[Series], float]
) -> dict[int, tuple[Series, Series]]:
    """Returns the `MOST_GPUS` curves with the largest values of ``by``, in their order."""
    kept = sorted(curves, key=lambda gpu: by(curves[gpu][1]), reverse=True)[:MOST_GPUS]
    return {gpu: curve for gpu, curve in curves.items() if gpu in kept}


def of_host(evidence: Evidence, name: str) -> dict[int, tuple[Series, Series]]:
    """Returns the same for the host."""
    return readings(evidence.watched, name, [HOST])


def readings(
    curves: Mapping[int, Mapping[str, Series]], name: str, gpus: Iterable[int]
) -> dict[int, tuple[Series, Series]]:
    """Returns times and readings of a figure by GPU, or of the host; those without any are left out."""
    found = {}
    for gpu in gpus:
        at_s, values = (curves.get(gpu, {}).get(column, np.empty(0)) for column in ("time_s", name))
        there = np.isfinite(at_s) & np.isfinite(values) if len(at_s) == len(values) else np.zeros(0, bool)
        if there.any():
            found[gpu] = (at_s[there], values[there])
    return found


def binned(x: Series, values: Series, lasts: Series | None = None) -> Binned:
    """Thins the curve of ``values`` at ``x``, both ``[readings]``, in order; where one is not finite, there is a gap.

    Args:
        lasts: the length of ``x`` that each value is about, where that differs.
    """
    there = np.isfinite(x) & np.isfinite(values)
    x, values = x[there], values[there]
    number = len(x)
    if number == 0:
        return Binned(x, values, values, values, False)
    late = _gaps(x, np.zeros(number) if lasts is None else lasts[there])
    gaps = np.union1d(late, 1 + np.flatnonzero(np.diff(np.flatnonzero(there)) > 1))
    gaps = gaps if len(gaps) <= MOST else late
    first = np.unique(np.append(np.linspace(0, number, min(MOST, number), endpoint=False).astype(int), gaps))
    count = np.diff(np.append(first, number))
    found = [np.add.reduceat(values, first) / count]
    found += [np.minimum.reduceat(values, first), np.maximum.reduceat(values, first)]
    breaks, at = np.searchsorted(first, gaps), np.add.reduceat(x, first) / count
    mean, low, high = (np.insert(curve, breaks, np.nan) for curve in found)
    return Binned(np.insert(at, breaks, (at[breaks - 1] + at[breaks]) / 2), mean, low, high, number > MOST)


def _gaps(x: Series, lasts: Series) -> npt.NDArray[np.intp]:
    """Returns the places of the readings that follow a gap."""
    steps = np.diff(x)
    if len(steps) < 2 or not np.median(steps) > 0:
        return np.empty(0, dtype=np.intp)
    found = 1 + np.flatnonzero(steps > _GAP * np.maximum(np.median(steps), lasts[1:]))
    return found if len(found) <= MOST else found[:0]  # this irregular, it has none
