"""Draws what steps took over time, part upon part, with the warm-up, what happened, and the swing measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.step_times import OTHER
from wellfed.explain.pages.chart import Axis, Chart, ChartCurve, Colour, Key, Note, PagePicture, Stretch
from wellfed.explain.report.pictures.picture_parts import PERIODS, TimeAxis, binned, of_many
from wellfed.explain.report.run_lines import EVERYDAY_EVENTS
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.units import counted, show_duration, show_ms

PARTS: Mapping[str, Colour] = {"wait": "one", "copy": "two", "compute": "three", "host": "four"}
"""Kinds of a step's time and their colours."""
_COLOURS: Mapping[str, Colour] = {**PARTS, "forward": "eight", "backward": "five", "optimizer": "six", OTHER: "seven"}
"""Colours of these kinds and of the phases of compute."""
_PAUSE = "what lay before the step"
_MARKS = ("▼", "▲", "■", "◆", "●", "✚")
_MOST_MARKS = 300
MOST_SHARES, FEWEST_TIMED = 100, 20
"""Points of the curve of ready batches, and fewest steps of a histogram."""
_SEEN_FRAC = 1 / 100
"""Smallest visible gap, as a share of the time."""


def step_time(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the parts of a step on top of each other, with the warm-up and events; then the last periods of a swing."""
    table = evidence.all_steps
    at_s, number = table.get("time_s", np.empty(0)), len(table.get("wait_ms", ()))
    if number == 0 or len(at_s) != number:
        return
    parts = parts_of(evidence)
    if not parts:
        return
    total_ms = np.sum(list(parts.values()), axis=0)
    total, *means = (binned(at_s, ms, lasts=total_ms / 1e3) for ms in (total_ms, *parts.values()))
    x, curves = total.x, [curve.y for curve in means]
    is_warmup = evidence.steps.is_warmup
    steady_ms = total_ms if is_warmup.all() else total_ms[~is_warmup]
    # The upper limit of the axis: a few very long steps must not flatten all others.
    usual_ms = float(np.nanpercentile(total.y, 95)) if np.isfinite(total.y).any() else 1.0
    most_ms = max(1e-3, 1.08 * min(float(steady_ms.max()), 2.5 * usual_ms))
    if len(total.x) == 1:  # an area needs a begin and an end
        x, curves = total.x[0] - [total_ms[0] / 1e3, 0.0], [np.repeat(curve, 2) for curve in curves]
    areas = [ChartCurve(name, colour_of(name), x, y, kind="area") for name, y in zip(parts, curves, strict=True)]
    if total.high is not None:
        areas.append(ChartCurve("the longest of steps that lie together", "ink", total.x, total.high, is_strong=False))
    if len(table.get("step", ())) == number:
        areas.append(binned(at_s, table["step"], "step", kind="told"))
    notes, keys = _happened(evidence, axis, most_ms)
    spans = axis.strip
    if is_warmup.any() and number > 1:
        begins_s = np.maximum(axis.begin_s, at_s - total_ms / 1e3)
        bounds = np.flatnonzero(np.diff(is_warmup, prepend=False, append=False)).reshape(-1, 2)
        spans = [*(Stretch(float(begins_s[a]), float(at_s[b - 1]), "ink") for a, b in bounds.tolist()), *spans]
        keys.append(Key("ink", "warm-up", "shade"))
    shares = ", ".join(f"{name} {show_ms(ms.mean())}" for name, ms in parts.items())
    told = f"Time of a step over {counted(number, 'step')}: {shares} on average."
    chart = axis.chart("ms a step", areas, most_ms, told, spans=spans, notes=notes, more_keys=keys, height=180)
    longest = int(total_ms.argmax())
    caption = of_many(number, "step")
    if total_ms[longest] > most_ms:
        caption += f" The longest, step {table['step'][longest]:.0f}, took {show_duration(total_ms[longest] / 1e3)}."
    caption += "".join(f" {told}" for told in _pauses(evidence, axis, at_s - total_ms / 1e3))
    yield PagePicture("Time of a step", [chart], caption=caption)
    if len(ready := table.get("ready", np.empty(0))) == number and np.isfinite(ready).any():
        yield _ready(at_s, ready, axis)
    swing = evidence.record.swing
    period = swing["period_steps"] if swing else None
    if swing and period and 2 * period <= number:
        if evidence.swings.of_steps and evidence.swings.of_steps[0].where == "gap":
            parts[_PAUSE] = evidence.steps.all_gap_ms
        yield _folded(table, parts, period, swing["period_s"])


def parts_of(evidence: Evidence, phases_ms: Mapping[str, Series] | None = None) -> dict[str, Series]:
    """Returns the milliseconds of each kind of time in all steps, warm-up included, without kinds that have no figure.

    Compute is divided among its phases in the steps where they are known, by default by `StepTimes.all_phases_ms`.
    """
    found: dict[str, Series] = {}
    for name in PARTS:
        column = evidence.all_steps.get(f"{name}_ms", np.empty(0))
        if np.isfinite(column).any():
            found[name] = np.nan_to_num(column)
        if name == "compute" and (phases := evidence.steps.all_phases_ms if phases_ms is None else phases_ms):
            found[name] = np.where(np.isfinite(phases[OTHER]), 0.0, found[name])
            found |= {phase: np.nan_to_num(ms) for phase, ms in phases.items()}
            found = {kind: ms for kind, ms in found.items() if kind not in (name, OTHER) or ms.any()}
    return found


def colour_of(name: str) -> Colour:
    """Returns the colour of a kind of time; that of an error for a pause."""
    return _COLOURS.get(name, "bad")


def _ready(at_s: Series, ready: Series, axis: TimeAxis) -> PagePicture:
    """Draws the share of steps whose batch was waiting when asked for."""
    number = max(1, len(ready) // MOST_SHARES)
    begins = np.arange(0, len(ready), number)
    counts = np.diff(np.append(begins, len(ready)))
    shares, middle_s = (np.add.reduceat(np.nan_to_num(column), begins) / counts for column in (100 * ready, at_s))
    curve = ChartCurve("batches ready", "good", middle_s, shares)
    told = f"Steps whose batch was ready, over time: {100 * np.nanmean(ready):.0f} % on average."
    return PagePicture("Batches ready", [axis.chart("% of steps", [curve], 100.0, told, height=60)])


def histogram(evidence: Evidence) -> Iterator[PagePicture]:
    """Draws how many steps took how long, the warm-up left out; the longest 0.5 % are in the last bar."""
    total_ms = evidence.steps.wait_ms + evidence.steps.rest_ms
    total_ms = total_ms[np.isfinite(total_ms)]
    if len(total_ms) < FEWEST_TIMED:
        return
    low, median, p95, high = (float(level) for level in np.percentile(total_ms, (0, 50, 95, 99.5)))
    high = max(high, 1.01 * low, low + 1e-3)
    counts, edges = np.histogram(np.minimum(total_ms, high), min(40, 5 + len(total_ms) // 10), (low, high))
    x = np.repeat(edges, 2)[1:-1]
    x[2::2] += (high - low) / 1000  # a curve has one value at each place
    stairs = ChartCurve("how long steps took", "three", x, np.repeat(counts, 2).astype(float), kind="area")
    top = float(counts.max())
    notes = [Note(at, 1.12 * top, text, "ink") for at, text in ((median, "▾ median"), (p95, "▾ p95"))]
    chart = Chart(
        unit="steps",
        axis=Axis(low, high, "ms a step"),
        curves=[stairs],
        top=1.35 * top,
        told=f"Steps by their time: median {show_ms(median)}, p95 {show_ms(p95)}.",
        notes=notes if p95 - median > 0.15 * (high - low) else notes[:1],
        height=110,
    )
    yield PagePicture("How long steps took", [chart])


def _happened(evidence: Evidence, axis: TimeAxis, most_ms: float) -> tuple[list[Note], list[Key]]:
    """Returns a mark at each event that needs attention, above the steps, and their legend."""
    kinds: dict[str, list[float]] = {}
    for event in evidence.record.events:
        if _is_marked(event):
            kinds.setdefault(event["kind"], []).append(event["time_s"])
    notes, keys = [], []
    for place, (kind, times_s) in enumerate(kinds.items()):
        mark = _MARKS[place % len(_MARKS)]
        at_s = np.clip(np.array(times_s), axis.begin_s, axis.end_s)[:_MOST_MARKS].tolist()
        notes += [Note(one_s, 0.96 * most_ms, mark, "bad", "on") for one_s in at_s]
        keys.append(Key("bad", f"{kind}, {len(times_s)} times" if len(times_s) > 1 else kind, "mark", mark))
    return notes, keys


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
    return (event["kind"] not in EVERYDAY_EVENTS or event["kind"] == "resume") and event.get("time_s") is not None


def _folded(table: Mapping[str, Series], parts: Mapping[str, Series], period: int, period_s: float) -> PagePicture:
    """Draws the last periods of a swing, step by step."""
    number = min(PERIODS, len(table["step"]) // period)
    steps, latest = table["step"][-number * period :], {name: ms[-number * period :] for name, ms in parts.items()}
    total_ms = np.sum(list(latest.values()), axis=0)
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
    chart = Chart(
        unit="ms a step",
        axis=Axis(float(steps[0]), float(steps[-1]), "step"),
        curves=[binned(steps, ms, name, colour_of(name), kind="area") for name, ms in latest.items()],
        top=1.35 * top or 1.0,
        told=f"The last {number} periods of a swing, step by step.",
        notes=[Note(begin, 1.12 * top, text, "bad", until=min(begin + period, float(steps[-1])))],
    )
    return PagePicture(f"Steps of the last {number} periods", [chart])
