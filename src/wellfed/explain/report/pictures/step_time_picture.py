"""Draws what steps took over time, part upon part, with the warm-up, what happened, and the swing measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.picture import BAD, INK, SERIES, picture
from wellfed.explain.report.pictures.picture_parts import (
    MOST,
    PERIODS,
    WIDTH,
    Binned,
    Key,
    PagePicture,
    binned,
    measure,
    of_many,
    rows,
)
from wellfed.explain.report.pictures.time_axis import TimeAxis
from wellfed.explain.report.run_lines import EVERYDAY_EVENTS
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.units import counted, show_duration, show_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS = ("wait", "copy", "compute", "host")
_PAUSE = "what lay before the step"
_COLOURS = {**dict(zip(_PARTS, SERIES, strict=True)), _PAUSE: BAD}
_MARKS = (("v", "▼"), ("^", "▲"), ("s", "■"), ("D", "◆"), ("o", "●"), ("P", "✚"))
"""Marks of events: matplotlib's, and the legend's."""
_SEEN_FRAC = 1 / 100
"""Smallest visible gap, as a share of the time."""


def step_time(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the parts of a step on top of each other, with the warm-up and events."""
    table = evidence.all_steps
    at_s, number = table.get("time_s", np.empty(0)), len(table.get("wait_ms", ()))
    if number == 0 or len(at_s) != number:
        return
    parts = {name: np.nan_to_num(table[f"{name}_ms"]) for name in _PARTS if np.isfinite(table[f"{name}_ms"]).any()}
    total_ms = np.sum(list(parts.values()), axis=0)
    curves = [binned(axis.scaled(at_s), ms, axis.scaled(total_ms / 1e3)) for ms in (total_ms, *parts.values())]
    total = curves[0]
    warmup = evidence.record.throughput["warmup_steps"] if evidence.record.throughput else 0
    most_ms = _most(total_ms[warmup:] if warmup < number else total_ms, total)
    swing = evidence.record.swing
    period = swing["period_steps"] if swing and swing["period_steps"] and 2 * swing["period_steps"] <= number else 0
    keys = [Key(_COLOURS[name], name, "area") for name in parts]
    with picture(WIDTH, 2.6 + 1.75 * bool(period)) as drawn:
        below = rows(drawn.figure, [2.0, 1.15][: 1 + bool(period)])
        axes = below[0]
        if warmup and number > 1:
            begin_s = max(axis.begin_s, float(at_s[0] - total_ms[0] / 1e3))
            end_s = max(float(at_s[min(warmup, number) - 1]), begin_s + axis.span_s / 250)
            axes.axvspan(*axis.scaled(np.array([begin_s, end_s])), color=INK, alpha=0.15, linewidth=0)
            keys.append(Key(INK, "warm-up", "shade"))
        _areas(axes, total.x, [curve.mean for curve in curves[1:]], list(parts))
        if total.is_thinned:
            axes.plot(total.x, total.high, color=INK, linewidth=0.6, alpha=0.5)
            keys.append(Key(INK, "the longest of steps that lie together"))
        axes.set_ylim(0, most_ms)
        axes.set_ylabel("ms a step")
        keys += _happened(axes, evidence, axis, most_ms)
        axis.put_under(axes)
        shares = ", ".join(f"{name} {show_ms(ms.mean())}" for name, ms in parts.items())
        if period and swing:
            if evidence.swings_of_steps and evidence.swings_of_steps[0].where == "gap":
                pauses_ms = np.concatenate([np.zeros(number - len(evidence.gap_ms)), evidence.gap_ms])
                parts = {**parts, _PAUSE: pauses_ms}
                keys.append(Key(_COLOURS[_PAUSE], _PAUSE, "area"))
            _folded(below[-1], table, parts, period, swing["period_s"])
        drawn.told = f"Time of a step over {counted(number, 'step')}: {shares} on average."
    longest = int(total_ms.argmax())
    caption = of_many(number, "step")
    if total_ms[longest] > most_ms:
        caption += f" The longest, step {table['step'][longest]:.0f}, took {show_duration(total_ms[longest] / 1e3)}."
    caption += "".join(f" {told}" for told in _pauses(evidence, axis, at_s - total_ms / 1e3))
    yield PagePicture(drawn.svg, keys, caption)


def _most(total_ms: Series, curve: Binned) -> float:
    """Returns the upper limit of the axis: a few very long steps must not flatten all others."""
    usual_ms = float(np.nanpercentile(curve.mean, 95)) if np.isfinite(curve.mean).any() else 1.0
    return max(1e-3, 1.08 * min(float(total_ms.max()), 2.5 * usual_ms))


def _areas(
    axes: Axes, x: Series, heights: Sequence[Series], names: Sequence[str], step: Literal["mid"] | None = None
) -> None:
    below = np.zeros(len(x))
    for height, name in zip(heights, names, strict=True):
        colour = _COLOURS[name]
        axes.fill_between(x, below, below + height, color=colour, alpha=0.8, linewidth=0, step=step)
        below = below + height


def _happened(axes: Axes, evidence: Evidence, axis: TimeAxis, most_ms: float) -> Iterator[Key]:
    """Draws a mark at each event that needs attention, above the steps."""
    kinds: dict[str, list[float]] = {}
    for event in evidence.record.events:
        if _is_marked(event):
            kinds.setdefault(event["kind"], []).append(event["time_s"])
    for place, (kind, times_s) in enumerate(kinds.items()):
        x = axis.scaled(np.clip(np.array(times_s), axis.begin_s, axis.end_s))
        mark, character = _MARKS[place % len(_MARKS)]
        axes.plot(x[:MOST], np.full(len(x[:MOST]), 0.96 * most_ms), mark, color=BAD, markersize=6, zorder=5)
        yield Key(BAD, f"{kind}, {len(x)} times" if len(x) > 1 else kind, "mark", character)


def _pauses(evidence: Evidence, axis: TimeAxis, began_s: Series) -> Iterator[str]:
    """Yields what lay in each gap of the picture, as far as recorded."""
    ended_s, steps = evidence.all_steps["time_s"], evidence.all_steps["step"]
    profiled = evidence.record.profile["steps"] if evidence.record.profile else None
    found: dict[str, list[int]] = {}
    for place in np.flatnonzero(began_s[1:] - ended_s[:-1] > _SEEN_FRAC * axis.span_s).tolist():
        begin_s, end_s = ended_s[place], began_s[place + 1]
        events = evidence.record.events
        causes = ["the profiler's trace was written"] if profiled and place + 1 == WARMUP_STEPS + profiled else []
        causes += [phase for phase, spans in axis.spans.items() if any(a < end_s and b > begin_s for a, b in spans)]
        causes += [one["kind"] for one in events if _is_marked(one) and begin_s <= one["time_s"] <= end_s]
        if causes:
            found.setdefault(", ".join(dict.fromkeys(causes)), []).append(place)
    for cause, places in found.items():
        longest = max(places, key=lambda place: float(began_s[place + 1] - ended_s[place]))
        lasted = show_duration(float(began_s[longest + 1] - ended_s[longest]))
        often = "The gap" if len(places) == 1 else f"{len(places)} gaps, the longest"
        yield f"{often} of {lasted} before step {steps[longest + 1]:.0f}: {cause}."


def _is_marked(event: Mapping[str, Any]) -> bool:
    """Returns whether an event has a mark."""
    return (event["kind"] not in EVERYDAY_EVENTS or event["kind"] == "resume") and event.get("time_s") is not None


def _folded(axes: Axes, table: Mapping[str, Series], parts: Mapping[str, Series], period: int, period_s: float) -> None:
    """Draws the last periods of a swing, step by step."""
    number = min(PERIODS, len(table["step"]) // period)
    steps, latest = table["step"][-number * period :], [ms[-number * period :] for ms in parts.values()]
    if len(steps) <= MOST:
        _areas(axes, steps, latest, list(parts), step="mid")
    else:
        curves = [binned(steps, ms) for ms in latest]
        _areas(axes, curves[0].x, [curve.mean for curve in curves], list(parts))
    total_ms = np.sum(latest, axis=0)
    top = float(np.percentile(total_ms, 99.5))
    first = int(total_ms.reshape(number, period).mean(axis=0).argmax())
    begins = np.arange(first, max(first + 1, len(steps) - period), period)
    at_s = table["time_s"][-len(steps) :]
    lasted_s = at_s[np.minimum(begins + period, len(steps) - 1)] - at_s[begins]
    nearest = int(np.abs(lasted_s - period_s).argmin())
    begin = float(steps[begins[nearest]])
    text = f"{period} steps"
    if abs(lasted_s[nearest] - period_s) < 0.2 * period_s:  # else a mean that no period took
        text += f", {show_duration(period_s)}"
    measure(axes, begin, min(begin + period, float(steps[-1])), 1.12 * top, text)
    axes.set_ylim(0, 1.5 * top)
    axes.set_ylabel("ms a step")
    axes.locator_params("x", integer=True)
    axes.set_xlabel(f"steps: the last {number} periods")
