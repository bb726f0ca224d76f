"""Draws learning curves: a picture of each metric, with its splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import Axis, Chart, ChartCurve, Colour, PagePicture, limits
from wellfed.explain.report.pictures.picture_parts import binned
from wellfed.explain.report.pictures.time_axis import TimeAxis
from wellfed.explain.report.run_lines import show_figure

MOST_METRICS = 9
"""Most metrics with a picture; all are in the table."""
_COLOURS: tuple[Colour, ...] = ("three", "one", "two", "four")


def metrics(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws a picture of each metric, with its splits: over time if steps.csv has it, else over steps."""
    table = evidence.all_steps
    step, at_s = (table.get(name, np.empty(0)) for name in ("step", "time_s"))
    has_times = len(step) > 1 and len(step) == len(at_s) and bool(np.all(np.isfinite(step) & np.isfinite(at_s)))
    times = Times(step, at_s, axis) if has_times else None
    by_name: dict[str, dict[str, tuple[Series, Series]]] = {}
    for (split, name), found in evidence.metrics.items():
        if split != "throughput":
            by_name.setdefault(name, {})[split] = found
    drawn_ones = [
        (name, splits) for name, splits in by_name.items() if any(len(steps) > 1 for steps, _ in splits.values())
    ]
    for name, splits in drawn_ones[:MOST_METRICS]:
        yield _metric(name, splits, times)


@dataclass(frozen=True)
class Times:
    """Ends of steps on the time axis of the run."""

    step: Series
    at_s: Series
    axis: TimeAxis


def _metric(name: str, splits: Mapping[str, tuple[Series, Series]], times: Times | None) -> PagePicture:
    curves, gone = [], []
    for place, (split, (steps, values)) in enumerate(sorted(splits.items(), key=lambda one: one[0] != "train")):
        x = steps if times is None else np.interp(steps, times.step, times.at_s)
        curves.append(binned(x, values).curve(f"{split} {show_figure(float(values[-1]))}", _COLOURS[place % 4]))
        missing = int((~np.isfinite(values)).sum())
        if missing:
            first = steps[~np.isfinite(values)][0]
            gone.append(f"{split} is not finite in {missing} of {len(values)} rows, first at step {first:.0f}")
    told = f"{name} over steps; latest: {', '.join(curve.name for curve in curves)}."
    steps, values = (np.concatenate(found) for found in zip(*splits.values(), strict=True))
    low, high = limits(values)
    axis = Axis(*limits(steps, 0.0), "step") if times is None else times.axis.axis
    if times is not None:
        step = binned(times.at_s, times.step)
        curves.append(ChartCurve("step", "ink", step.x, step.mean, kind="told"))
    spans = [] if times is None else times.axis.strip
    chart = Chart(*("", axis, curves, high, low, told), spans=spans, height=140, is_linked=times is not None)
    return PagePicture(name, [chart], caption="; ".join(gone))
