"""Draws charts in the colours of their page, by uPlot in the browser, and bars as HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
SERIES: tuple[Colour, ...] = ("three", "one", "two", "four")
"""Colours of four curves beside each other."""
Stroke = Literal["line", "dashed", "dotted"]
Kind = Literal["line", "area", "told"]
"""Way of drawing; ``told`` is not drawn, and its value is shown with the others."""
_TIME_UNITS = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a chart."""

    begin: float
    end: float
    label: str
    is_time: bool = False
    """Seconds, shown in the unit that fits."""

    @property
    def unit(self) -> tuple[float, str]:
        """Length of the unit that is shown, and its name."""
        units = _TIME_UNITS if self.is_time else ((-math.inf, 1.0, ""),)
        return next((size_s, name) for least_s, size_s, name in units if self.end >= least_s)

    @property
    def title(self) -> str:
        """Label with the unit."""
        return f"{self.unit[1]} {self.label}".strip()


@dataclass(frozen=True)
class ChartCurve:
    """Values over the axis, in its order; ``nan`` is a gap."""

    name: str
    colour: Colour
    x: Series
    y: Series
    low: Series | None = None
    """Lower end of the readings that a point stands for; None: a point is one reading. As `high`."""
    high: Series | None = None
    kind: Kind = "line"


@dataclass(frozen=True)
class LevelLine:
    """A horizontal line."""

    name: str
    y: float
    colour: Colour
    stroke: Stroke = "line"


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    colour: Colour
    text: str
    kind: Literal["area", "shade", "line", "dashed", "dotted"] = "line"


Stretch = tuple[float, float, Colour]
"""Begin, end and colour of a stretch of the axis: a phase of the run."""


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
        return [*curves, *(Key(one.colour, one.name, one.stroke) for one in self.levels)]

    @property
    def html(self) -> Markup:
        """HTML of the chart without its legend, which ``charts.js`` draws."""
        kinds = {" bare": not self.is_labelled, " alone": not self.is_linked}
        classes = "".join(kind for kind, is_so in kinds.items() if is_so)
        # The page says it once for all that are linked.
        axis = show_text(self.axis.title) if self.is_labelled and not self.is_linked else ""
        return Markup(
            '<div class="plot{} alive" role="img" aria-label="{}" style="height:{}px">'
            '<script type="application/json">{}</script>{}{}</div>'
        ).format(
            classes,
            show_text(self.told),
            self.height,
            Markup(_payload(self)),
            Markup("<span class=t>{}</span>").format(axis) if axis else "",
            Markup("<span class=h>{}</span>").format(show_text(self.title)) if self.title else "",
        )


@dataclass(frozen=True)
class PagePicture:
    """Charts above each other, or a picture of the workload's own, and what stands beside them."""

    title: str
    charts: Sequence[Chart] = ()
    image: Markup | None = None
    caption: str = ""
    more_keys: Sequence[Key] = ()

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


def _payload(chart: Chart) -> str:
    """Returns the figures of the chart as JSON for ``charts.js``, safe within HTML; keys are as short as there."""
    axes: list[Series] = []
    curves = []
    for curve in chart.curves:
        group = next((place for place, known in enumerate(axes) if np.array_equal(curve.x, known)), len(axes))
        axes += [curve.x] * (group == len(axes))
        edges = [] if curve.low is None or curve.high is None else [_short(curve.low), _short(curve.high)]
        curves.append([show_text(curve.name), curve.colour, curve.kind, group, _short(curve.y), *edges])
    size, unit = chart.axis.unit
    found = {
        "x": [*_short([chart.axis.begin, chart.axis.end]), size],
        "y": _short([chart.bottom, chart.top]),
        "u": [unit or chart.axis.label, chart.unit],
        "h": chart.height,
        "a": int(chart.is_labelled),
        "k": int(chart.is_linked),
        "f": int(chart.unit == "%"),
        "g": [_short(x) for x in axes],
        "c": curves,
        "l": [[*_short([one.y]), one.colour, one.stroke] for one in chart.levels],
        "s": [[*_short([begin, end]), colour] for begin, end, colour in chart.spans],
    }
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})


def _short(values: Series | Sequence[float]) -> list[float | None]:
    """Returns the values with seven digits; None for what is not finite."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


@dataclass(frozen=True)
class Bar:
    """A bar of one or more parts in a row of bars."""

    label: str
    parts: Sequence[tuple[Colour, float, str]]
    """Colour, value and text of each part."""
    text: str = ""


def bars(rows: Sequence[Bar], told: str, top: float | None = None) -> Markup:
    """Returns bars below each other on one scale, ``told`` to readers who cannot see them; ``top``: a whole bar."""
    top = top or max((sum(value for _, value, _ in row.parts) for row in rows), default=0.0) or 1.0
    part = Markup('<i class={} style="width:{:.4g}%" title="{}"></i>')
    html = Markup("").join(
        Markup("<span>{}</span><span class=track>{}</span><span>{}</span>").format(
            show_text(row.label),
            Markup("").join(
                part.format(colour, 100 * value / top, show_text(name)) for colour, value, name in row.parts
            ),
            show_text(row.text),
        )
        for row in rows
    )
    return Markup('<div class=bars role="img" aria-label="{}">{}</div>').format(show_text(told), html)
