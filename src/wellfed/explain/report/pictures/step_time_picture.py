"""Draws what steps took over time, part upon part, with the warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.step_times import OTHER
from wellfed.explain.pages.chart import Axis, Chart, ChartCurve, Colour, Key, Note, PagePicture, Stretch
from wellfed.explain.report.pictures.picture_parts import TimeAxis, binned, of_many
from wellfed.units import counted, show_duration, show_ms

PARTS: Mapping[str, Colour] = {"wait": "one", "copy": "two", "compute": "three", "host": "four"}
"""Kinds of a step's time and their colours."""
_COLOURS: Mapping[str, Colour] = {**PARTS, "forward": "eight", "backward": "five", "optimizer": "six", OTHER: "seven"}
"""Colours of these kinds and of the phases of compute."""
MOST_SHARES, FEWEST_TIMED = 100, 20
"""Points of the curve of ready batches, and fewest steps of a histogram."""


def step_time(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the parts of a step on top of each other, with the warm-up; then the share of ready batches."""
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
        areas.append(ChartCurve("the slowest of each group of steps", "ink", total.x, total.high, is_strong=False))
    if len(table.get("step", ())) == number:
        areas.append(binned(at_s, table["step"], "step", kind="told"))
    keys, spans = list[Key](), axis.strip
    if is_warmup.any() and number > 1:
        begins_s = np.maximum(axis.begin_s, at_s - total_ms / 1e3)
        bounds = np.flatnonzero(np.diff(is_warmup, prepend=False, append=False)).reshape(-1, 2)
        spans = [*(Stretch(float(begins_s[a]), float(at_s[b - 1]), "ink") for a, b in bounds.tolist()), *spans]
        keys.append(Key("ink", "warm-up", "shade"))
    shares = ", ".join(f"{name} {show_ms(ms.mean())}" for name, ms in parts.items())
    told = f"Time of a step over {counted(number, 'step')}: {shares} on average."
    chart = axis.chart("ms a step", areas, most_ms, told, spans=spans, more_keys=keys, height=180)
    longest = int(total_ms.argmax())
    caption = of_many(number, "step")
    if total_ms[longest] > most_ms:
        caption += f" The longest, step {table['step'][longest]:.0f}, took {show_duration(total_ms[longest] / 1e3)}."
    yield PagePicture("Time of a step", [chart], caption=caption)
    if len(ready := table.get("ready", np.empty(0))) == number and np.isfinite(ready).any():
        yield _ready(at_s, ready, axis)


def parts_of(evidence: Evidence) -> dict[str, Series]:
    """Returns the milliseconds of each kind of time in all steps, without kinds that have no figure."""
    columns = {name: evidence.all_steps.get(f"{name}_ms", np.empty(0)) for name in PARTS}
    return {name: np.nan_to_num(column) for name, column in columns.items() if np.isfinite(column).any()}


def colour_of(name: str) -> Colour:
    """Returns the colour of a kind of time."""
    return _COLOURS[name]


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
