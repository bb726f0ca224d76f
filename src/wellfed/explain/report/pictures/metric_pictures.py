"""Draws learning curves: a picture of each metric, with its splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.picture import INK, SERIES, picture
from wellfed.explain.report.pictures.picture_parts import Key, PagePicture, binned, curve
from wellfed.explain.report.run_lines import show_figure
from wellfed.units import show_text

MOST_METRICS = 9
"""Most metrics with a picture; all are in the table."""


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
    captions, keys, gone = [], [], []
    with picture(3.9, 2.1) as drawn:
        axes = drawn.figure.add_subplot()
        for place, (split, (steps, values)) in enumerate(sorted(splits.items(), key=lambda one: one[0] != "train")):
            colour = (SERIES[2], SERIES[0], SERIES[1], SERIES[3])[place % 4]
            found = binned(steps, values)
            mark = "o" if np.isfinite(found.x).sum() < 40 else ""
            curve(axes, found, colour, mark)
            captions.append(f"{split} {show_figure(float(values[-1]))}")
            keys.append(Key(colour, captions[-1]))
            missing = int((~np.isfinite(values)).sum())
            if missing:
                first = steps[~np.isfinite(values)][0]
                gone.append(f"{split} is not finite in {missing} of {len(values)} rows, first at step {first:.0f}")
        axes.set_xlabel("step")
        axes.locator_params("x", integer=True)
        axes.grid(axis="y", color=INK, alpha=0.12, linewidth=0.7)
        drawn.told = f"{show_text(name)} over steps; latest: {show_text(', '.join(captions))}."
    return PagePicture(drawn.svg, keys, "; ".join(gone), name)
