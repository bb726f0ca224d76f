"""Draws learning curves: a picture of each metric, with its splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import Axis, Chart, Colour, PagePicture, limits
from wellfed.explain.report.pictures.picture_parts import binned
from wellfed.explain.report.run_lines import show_figure

MOST_METRICS = 9
"""Most metrics with a picture; all are in the table."""
_COLOURS: tuple[Colour, ...] = ("three", "one", "two", "four")


def metrics(evidence: Evidence) -> Iterator[PagePicture]:
    """Draws a picture of each metric, with its splits."""
    by_name: dict[str, dict[str, tuple[Series, Series]]] = {}
    for (split, name), found in evidence.metrics.items():
        if split != "throughput":
            by_name.setdefault(name, {})[split] = found
    drawn_ones = [
        (name, splits) for name, splits in by_name.items() if any(len(steps) > 1 for steps, _ in splits.values())
    ]
    for name, splits in drawn_ones[:MOST_METRICS]:
        yield _metric(name, splits)


def _metric(name: str, splits: Mapping[str, tuple[Series, Series]]) -> PagePicture:
    curves, gone = [], []
    for place, (split, (steps, values)) in enumerate(sorted(splits.items(), key=lambda one: one[0] != "train")):
        curves.append(binned(steps, values).curve(f"{split} {show_figure(float(values[-1]))}", _COLOURS[place % 4]))
        missing = int((~np.isfinite(values)).sum())
        if missing:
            first = steps[~np.isfinite(values)][0]
            gone.append(f"{split} is not finite in {missing} of {len(values)} rows, first at step {first:.0f}")
    told = f"{name} over steps; latest: {', '.join(curve.name for curve in curves)}."
    steps, values = (np.concatenate(found) for found in zip(*splits.values(), strict=True))
    low, high = limits(values)
    axis = Axis(*limits(steps, 0.0), "step")
    return PagePicture(name, [Chart("", "", axis, curves, high, low, told, height=150)], caption="; ".join(gone))
