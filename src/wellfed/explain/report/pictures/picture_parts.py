"""Holds what the pictures of a run share: their width, legends, scales, rulers, and readings by GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.picture import ACCENT, BAD, INK
from wellfed.explain.report.run_lines import MOST_GPUS
from wellfed.observe.telemetry.machines import HOST, is_host
from wellfed.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.0
"""Inches of 72 pixels: text is readable on a phone, and two of them stand side by side on a desk."""
PERIODS = 6
"""Periods drawn of a swing that is too short for the picture of the whole run."""


MOST = 300
"""Maximum points of a curve in a picture; more are indistinguishable."""
_GAP = 6
"""Times the usual distance of readings: further apart there is a gap between them."""


@dataclass(frozen=True)
class Key:
    """An entry of a legend, which stands in HTML: there it wraps where a picture's own is cut."""

    colour: str
    """A stand-in of `wellfed.explain.pages.picture`."""
    text: str
    kind: Literal["area", "shade", "line", "dashed", "dotted", "mark"] = "line"
    mark: str = ""
    """The character that stands for it."""


@dataclass(frozen=True)
class PagePicture:
    """A picture and what stands beside it."""

    svg: Markup
    keys: Sequence[Key] = ()
    caption: str = ""
    title: str = ""


def rows(figure: Figure, heights: Sequence[float]) -> list[Axes]:
    """Returns axes below each other, with these heights in inches."""
    return list(figure.subplots(len(heights), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0])


def curve(axes: Axes, curve: Binned, colour: str = ACCENT, mark: str = "", shade: float = 0.25) -> None:
    """Draws the mean, and the range where a point stands for several readings."""
    if curve.is_thinned:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=shade, linewidth=0)
    axes.plot(curve.x, curve.mean, color=colour, linewidth=1.2, marker=mark, markersize=3)


def scale(axes: Axes, top: float, unit: str, *, has_room: bool = False) -> None:
    """Sets the vertical axis from 0 up, with room for a ruler or a name above the curve."""
    axes.set_ylim(0, (1.25 if has_room else 1.05) * top)
    if unit == "%":
        axes.set_yticks([0, 50, 100])
    axes.set_ylabel(unit)
    axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.7)


def of_many(number: int, noun: str) -> str:
    """Returns the label of a curve over ``number`` GPUs."""
    if number <= MOST:
        return f"{counted(number, noun)[0].upper()}{counted(number, noun)[1:]}."
    return f"{counted(number, noun)}: mean and range of those that lie together."


def measure(axes: Axes, begin: float, end: float, height: float, text: str) -> None:
    """Draws a ruler."""
    style = {"arrowstyle": "|-|,widthA=.3,widthB=.3", "color": BAD, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (begin, height), (end, height), arrowprops=style)
    axes.annotate(text, ((begin + end) / 2, height), xytext=(0, 4), textcoords="offset points", ha="center", color=BAD,
                  weight="bold")  # fmt: skip


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
    """Thins the curve of ``values`` at ``x``, both ``[readings]``, in order; values that are not finite are left out.

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
    """Returns the places of the readings that follow a gap."""
    steps = np.diff(x)
    if len(steps) < 2 or not np.median(steps) > 0:
        return np.empty(0, dtype=np.intp)
    found = 1 + np.flatnonzero(steps > _GAP * np.maximum(np.median(steps), lasts[1:]))
    return found if len(found) <= MOST else found[:0]  # this irregular, it has none
