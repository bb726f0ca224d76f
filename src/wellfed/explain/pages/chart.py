"""Draws charts in the colours of their page, by uPlot in the browser, and bars as HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from wellfed.units import show_text

Series = npt.NDArray[np.float64]
Colour = Literal[
    "ink", "soft", "accent", "bad", "good", "one", "two", "three", "four", "five", "six", "seven", "eight",
    "validate", "checkpoint", "test", "ceiling", "line", "wash",
]  # fmt: skip
"""Names of the colours of ``base.html.j2``, which has them for light and dark."""
SERIES: tuple[Colour, ...] = ("one", "two", "three", "four")
"""Colours of four curves or areas beside each other."""
Stroke = Literal["line", "dashed", "dotted"]
Kind = Literal["line", "area", "dots", "crosses", "told"]
"""Way of drawing; ``told`` is not drawn, and its value is shown with the others."""
_TIME_UNITS = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a chart."""

    begin: float
    end: float
    label: str
    kind: Literal["time", "number", "log"] = "number"
    """``time``: seconds, shown in the unit that fits."""

    @property
    def unit(self) -> tuple[float, str]:
        """Length of the unit that is shown, and its name."""
        if self.kind != "time":
            return 1.0, ""
        return next((size_s, name) for least_s, size_s, name in _TIME_UNITS if self.end >= least_s)

    @property
    def title(self) -> str:
        """Label with the unit."""
        return f"{self.unit[1]} {self.label}".strip()


@dataclass(frozen=True)
class ChartCurve:
    """Values over the axis; ``nan`` is a gap."""

    name: str
    colour: Colour
    x: Series
    y: Series
    low: Series | None = None
    """Lower end of the readings that a point stands for; None: a point is one reading. As `high`."""
    high: Series | None = None
    kind: Kind = "line"
    is_strong: bool = True
    """Drawn in full strength, and not as background."""


@dataclass(frozen=True)
class LevelLine:
    """A horizontal line."""

    name: str
    y: float
    colour: Colour
    stroke: Stroke = "line"
    label: str = ""


@dataclass(frozen=True)
class Stretch:
    """A stretch of the axis: a phase of the run."""

    begin: float
    end: float
    colour: Colour


@dataclass(frozen=True)
class Note:
    """A text at a point of the chart."""

    x: float
    y: float
    text: str
    colour: Colour = "ink"
    where: Literal["above", "right", "on"] = "above"


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    colour: Colour
    text: str
    kind: Literal["area", "shade", "line", "dashed", "dotted", "mark"] = "line"
    mark: str = ""
    """The character that stands for it."""


@dataclass(frozen=True)
class Chart:
    """Curves over one axis, with all that is drawn beside them."""

    unit: str
    axis: Axis
    curves: Sequence[ChartCurve]
    top: float
    bottom: float = 0.0
    told: str = ""
    """Description for readers who cannot see the chart."""
    title: str = ""
    """Title among the other charts of its picture."""
    levels: Sequence[LevelLine] = ()
    spans: Sequence[Stretch] = ()
    notes: Sequence[Note] = ()
    more_keys: Sequence[Key] = ()
    """Entries of the legend beside curves and levels."""
    height: int = 130
    """Pixels."""
    is_labelled: bool = True
    """The axis has its labels: it is the last of charts above each other."""
    is_linked: bool = False
    """Shares zoom and cursor with the other linked charts of the page."""

    @property
    def keys(self) -> list[Key]:
        """The legend."""
        shown = [one for one in self.curves if one.name and one.kind != "told"]
        curves = [Key(one.colour, one.name, "area" if one.kind == "area" else "line") for one in shown]
        return [*curves, *(Key(one.colour, one.name, one.stroke) for one in self.levels if one.name), *self.more_keys]

    @property
    def html(self) -> Markup:
        """HTML of the chart without its legend."""
        return Markup("").join(_html(self))


@dataclass(frozen=True)
class PagePicture:
    """Charts above each other, or a picture of the workload's own, and what stands beside them."""

    title: str
    charts: Sequence[Chart] = ()
    image: Markup | None = None
    caption: str = ""
    more_keys: Sequence[Key] = ()

    @property
    def unit(self) -> str:
        """Unit of the values."""
        return self.charts[0].unit if self.charts else ""

    @property
    def keys(self) -> list[Key]:
        """One legend of all charts; none where it would repeat the title."""
        keys = list(dict.fromkeys([*(key for chart in self.charts for key in chart.keys), *self.more_keys]))
        return [] if [key.text.lower() for key in keys] == [self.title.lower()] else keys


def limits(values: Series, margin: float = 0.05) -> tuple[float, float]:
    """Returns the least and the most that is finite, with a margin as a share of the range."""
    there = values[np.isfinite(values)]
    if not len(there):
        return 0.0, 1.0
    low, high = float(there.min()), float(there.max())
    room = margin * (high - low) if high > low else abs(high) / 2 or 0.5
    return low - room, high + room


def _html(chart: Chart) -> Iterator[Markup]:
    """Yields the elements of the chart, which ``charts.js`` draws."""
    kinds = {"bare": not chart.is_labelled, "alone": not chart.is_linked}
    yield Markup('<div class="plot{} alive" role="img" aria-label="{}" style="height:{}px">').format(
        "".join(f" {kind}" for kind, is_so in kinds.items() if is_so), show_text(chart.told), chart.height
    )
    yield Markup('<script type="application/json">{}</script>').format(Markup(_payload(chart)))
    if chart.is_labelled and not chart.is_linked:  # the page says it once for all that are
        yield Markup("<span class=t>{}</span>").format(show_text(chart.axis.title))
    if chart.title:
        yield Markup("<span class=h>{}</span>").format(show_text(chart.title))
    yield Markup("</div>")


def _payload(chart: Chart) -> str:
    """Returns the figures of the chart as JSON for ``charts.js``, safe within HTML; keys are as short as there."""
    axes: list[Series] = []
    curves = []
    for curve in chart.curves:
        order = np.argsort(curve.x, kind="stable")  # of dots, which may be in any order
        x = curve.x[order]
        group = next((place for place, known in enumerate(axes) if np.array_equal(x, known)), len(axes))
        axes += [x] * (group == len(axes))
        has_range = curve.low is not None and curve.high is not None and bool(np.any(curve.low != curve.high))
        columns = [curve.y, curve.low, curve.high] if has_range else [curve.y]
        name = show_text(curve.name)
        figures = [[_short(value) for value in one[order].tolist()] for one in columns if one is not None]
        curves.append([name, curve.colour, curve.kind, int(curve.is_strong), group, *figures])
    size, unit = chart.axis.unit
    found = {
        "x": [_short(chart.axis.begin), _short(chart.axis.end), size],
        "y": [_short(chart.bottom), _short(chart.top)],
        "u": [unit or chart.axis.label, chart.unit],
        "h": chart.height,
        "a": int(chart.is_labelled),
        "k": int(chart.is_linked),
        "f": int(chart.unit == "%"),
        "log": int(chart.axis.kind == "log"),
        "g": [_packed(x, is_log=chart.axis.kind == "log") for x in axes],
        "c": curves,
        "l": [[_short(one.y), one.colour, one.stroke, one.label] for one in chart.levels],
        "s": [[_short(one.begin), _short(one.end), one.colour] for one in chart.spans],
        "n": [
            [one.x, one.y, show_text(one.text), one.colour, one.where] for one in chart.notes if math.isfinite(one.y)
        ],
    }
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})


def _short(value: float, digits: int = 7) -> float | int | None:
    """Returns the value with so many digits, an integer where it is one; None if it is not finite."""
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if abs(value) < 1e15 and value == int(value) else value


def _packed(x: Series, *, is_log: bool) -> list[float | int | None]:
    """Returns the first place, a unit, and the steps from each place to the next in this unit, each of at least 1."""
    if not len(x):
        return []
    least = float(x[0]) / 100 if is_log else float(x[-1] - x[0]) / 1000
    unit = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    places = np.rint((x - x[0]) / unit) - np.arange(len(x))
    steps = np.diff(np.maximum.accumulate(places) + np.arange(len(x)))
    return [_short(float(x[0]), 9), unit, *steps.astype(int).tolist()]


@dataclass(frozen=True)
class Bar:
    """A bar of one or more parts in a row of bars."""

    label: str
    parts: Sequence[tuple[Colour, float, str]]
    """Colour, value and text of each part; a part without a text is a gap."""
    text: str = ""


def bars(rows: Sequence[Bar], told: str, top: float | None = None) -> Markup:
    """Returns bars below each other on one scale, ``told`` to readers who cannot see them; ``top``: a whole bar."""
    top = top or max((sum(value for _, value, _ in row.parts) for row in rows), default=0.0) or 1.0
    part, gap = Markup('<i class={} style="width:{:.4g}%" title="{}"></i>'), Markup('<i style="width:{:.4g}%"></i>')
    html = Markup("").join(
        Markup("<span>{}</span><span class=track>{}</span><span>{}</span>").format(
            show_text(row.label),
            Markup("").join(
                part.format(colour, 100 * value / top, show_text(name)) if name else gap.format(100 * value / top)
                for colour, value, name in row.parts
            ),
            show_text(row.text),
        )
        for row in rows
    )
    return Markup('<div class=bars role="img" aria-label="{}">{}</div>').format(show_text(told), html)
