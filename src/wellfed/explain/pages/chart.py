"""Draws charts in the colours of their page: curves and areas by uPlot in the browser, scatter plots as SVG."""

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
_WIDE, _HIGH = 1000, 250
"""Units of the plane that a path lies in: about a pixel and half a pixel."""
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

    def placed(self, values: Series) -> Series:
        """Returns places on the axis, 0 to 1."""
        begin, end = self.begin, self.end
        if self.kind == "log":
            begin, end, values = math.log10(begin), math.log10(end), np.log10(values)
        return (values - begin) / (end - begin) if end > begin else np.full(len(values), 0.5)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yields places and labels of its ticks."""
        size, _ = self.unit
        if self.kind == "log":
            powers = range(math.floor(math.log10(self.begin)), math.ceil(math.log10(self.end)) + 1)
            values = [10.0**power for power in powers if self.begin <= 10.0**power <= self.end]
            values = values or [self.begin, self.end]
        else:
            values = [size * tick for tick in nice_ticks(self.begin / size, self.end / size, 6)]
        for value, place in zip(values, self.placed(np.array(values)).tolist(), strict=True):
            yield place, f"{value / size:.10g}" if self.kind == "log" else show_tick(value / size)


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
    until: float | None = None
    """Where a ruler ends that begins at `x`; None: no ruler."""


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


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Returns at most ``most`` round numbers from ``low`` to ``high``, evenly apart."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low] if math.isfinite(low) else []
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * power for size in (1, 2, 2.5, 5, 10, 20) if span / (size * power) <= most - 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def show_tick(value: float) -> str:
    """Returns a number of an axis, short."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    if 1e-12 < abs(value) < 1e-2:
        digits, power = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}" if abs(value) > 1e-12 else "0"


def _html(chart: Chart) -> Iterator[Markup]:
    """Yields the elements of the chart. ``charts.js`` draws curves over an axis; a scatter plot is SVG."""
    is_live = all(np.all(np.diff(curve.x) > 0) for curve in chart.curves)
    kinds = {"bare": not chart.is_labelled, "alone": not chart.is_linked, "alive": is_live}
    yield Markup('<div class="plot{}" role="img" aria-label="{}" style="height:{}px">').format(
        "".join(f" {kind}" for kind, is_so in kinds.items() if is_so), show_text(chart.told), chart.height
    )
    if is_live:
        yield Markup('<script type="application/json">{}</script>').format(Markup(_payload(chart)))
    else:
        yield from _scatter(chart)
    if chart.is_labelled and not chart.is_linked:  # the page says it once for all that are
        yield Markup("<span class=t>{}</span>").format(show_text(chart.axis.title))
    if chart.title:
        yield Markup("<span class=h>{}</span>").format(show_text(chart.title))
    yield Markup("</div>")


def _scatter(chart: Chart) -> Iterator[Markup]:
    """Yields the stretched plane of a scatter plot (grid, lines, dots, levels), then labels."""
    yield Markup('<svg viewBox="0 0 {} {}" preserveAspectRatio="none">').format(_WIDE, _HIGH)
    path = Markup('<path class="{}" style="--c:var(--{})" d="{}"/>')
    ticks = nice_ticks(chart.bottom, chart.top, 5)
    yield path.format("g", "ink", "".join(f"M0 {_pixel(chart, tick)}h{_WIDE}" for tick in ticks))
    for curve in chart.curves[::-1]:
        is_known = np.isfinite(curve.x) & np.isfinite(curve.y)
        across = np.rint(_WIDE * chart.axis.placed(curve.x[is_known])).astype(int).tolist()
        points = [f"{x} {_pixel(chart, y)}" for x, y in zip(across, curve.y[is_known].tolist(), strict=True)]
        if curve.kind == "line" and points:
            yield path.format("l" if curve.is_strong else "l w", curve.colour, f"M{'L'.join(points)}")
        elif curve.kind in ("dots", "crosses"):
            kind, mark = ("c", "m-7-7l14 14m0-14l-14 14") if curve.kind == "crosses" else ("d big", "h0")
            yield path.format(kind, curve.colour, "".join(f"M{point}{mark}" for point in points))
    for level in chart.levels:
        yield path.format(f"l {level.stroke}", level.colour, f"M0 {_pixel(chart, level.y)}h{_WIDE}")
    yield Markup("</svg>")
    for tick in ticks:
        up = 100 * _upward(chart, tick)
        yield Markup('<span class=y style="bottom:{:.4g}%">{}</span>').format(up, show_tick(tick))
    for place, text in chart.axis.ticks() if chart.is_labelled else ():
        yield Markup('<span class=x style="left:{:.4g}%">{}</span>').format(100 * place, text)
    for level in chart.levels:
        if level.label:
            yield Markup('<span class=r style="bottom:{:.4g}%;color:var(--{})">{}</span>').format(
                100 * _upward(chart, level.y), level.colour, level.label
            )
    for note in _notes(chart):
        (left,) = chart.axis.placed(np.array([note.x])).tolist()
        yield Markup('<span class="n {}" style="left:{:.4g}%;bottom:{:.4g}%;color:var(--{})"><b>{}</b></span>').format(
            note.where, 100 * left, 100 * _upward(chart, note.y), note.colour, show_text(note.text)
        )


def _payload(chart: Chart) -> str:
    """Returns the figures of the chart as JSON for ``charts.js``, safe within HTML; keys are as short as there."""
    axes: list[Series] = []
    curves = []
    decimals = -math.floor(math.log10(_size(chart) / 1000))
    for curve in chart.curves:
        group = next((place for place, x in enumerate(axes) if np.array_equal(x, curve.x)), len(axes))
        axes += [curve.x] * (group == len(axes))
        has_range = curve.low is not None and curve.high is not None and bool(np.any(curve.low != curve.high))
        columns = [curve.y, curve.low, curve.high] if has_range else [curve.y]
        name = show_text(curve.name)
        figures = [_figures(one, 0 if curve.kind == "told" else decimals) for one in columns if one is not None]
        curves.append([name, curve.colour, curve.kind, int(curve.is_strong), group, *figures])
    size, unit = chart.axis.unit
    found = {
        "x": [_short(chart.axis.begin, 6), _short(chart.axis.end, 6), size],
        "y": [_short(chart.bottom), _short(chart.top)],
        "u": [unit or chart.axis.label, chart.unit],
        "h": chart.height,
        "a": int(chart.is_labelled),
        "k": int(chart.is_linked),
        "f": int(chart.unit == "%"),
        "log": int(chart.axis.kind == "log"),
        "g": [_packed(x) for x in axes],
        "c": curves,
        "l": [[_short(one.y), one.colour, one.stroke, one.label] for one in chart.levels],
        "s": [[_short(one.begin), _short(one.end), one.colour] for one in chart.spans],
        "n": [[one.x, one.y, show_text(one.text), one.colour, one.where, one.until] for one in _notes(chart)],
    }
    text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})


def _figures(values: Series, decimals: int) -> list[float | int | None]:
    """Returns values with so many decimals, and three digits at least; None where one is not finite."""
    return [
        _whole(round(value, max(decimals, 2 - math.floor(math.log10(abs(value)))) if value else 0))
        if math.isfinite(value)
        else None
        for value in values.tolist()
    ]


def _short(value: float, digits: int = 4) -> float | int:
    return _whole(float(f"{value:.{digits}g}"))


def _whole(value: float) -> float | int:
    return int(value) if abs(value) < 1e15 and value == int(value) else value


def _packed(x: Series) -> list[float | int]:
    """Returns the first place, a unit, and the steps from each place to the next in this unit, each of at least 1."""
    if not len(x):
        return []
    span = float(x[-1] - x[0])
    unit = 10.0 ** math.floor(math.log10(span / 1000)) if span > 0 else 1.0
    places = np.rint((x - x[0]) / unit) - np.arange(len(x))
    steps = np.diff(np.maximum.accumulate(places) + np.arange(len(x)))
    return [_short(float(x[0]), 9), unit, *steps.astype(int).tolist()]


def _notes(chart: Chart) -> list[Note]:
    """Returns the notes that have a place."""
    return [note for note in chart.notes if math.isfinite(note.y)]


def _upward(chart: Chart, value: float) -> float:
    return (value - chart.bottom) / (chart.top - chart.bottom) if chart.top > chart.bottom else 0.5


def _size(chart: Chart) -> float:
    size = chart.top - chart.bottom
    return size if size > 0 and math.isfinite(size) else 1.0


def _pixel(chart: Chart, value: float) -> int:
    return round(_HIGH * (1 - _upward(chart, value)))


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
