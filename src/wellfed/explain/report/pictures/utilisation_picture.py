"""Draws how busy each GPU was over time, its swing measured; without a GPU how busy the processor was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from wellfed.explain.diagnosis.curves.swing import LEAST_DEPTH, Swing
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import Axis, Chart, LevelLine, Note, PagePicture
from wellfed.explain.report.pictures.machine_pictures import cpus
from wellfed.explain.report.pictures.picture_parts import (
    PERIODS,
    binned,
    of_gpus,
    of_many,
    the_most,
)
from wellfed.explain.report.pictures.time_axis import TimeAxis
from wellfed.observe.telemetry.machines import named
from wellfed.units import show_duration

_RULED_FRAC = 1 / 16
"""Shortest period drawn over the whole run, as a share of the time."""
_HEIGHT, _LEAST_HEIGHT = 130, 44
"""Pixels of one curve, and of each of many."""


def utilisation(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the curve of each GPU, with phases and swing; without a GPU the cores at work."""
    what, curves = "utilisation", of_gpus(evidence, "util_pct")
    if not curves:  # as of a MIG instance
        what, curves = "SMs at work", of_gpus(evidence, "sm_active_pct")
    if not curves:
        yield from cpus(evidence, axis)
        return
    num_gpus = len(curves)
    curves = the_most(curves, lambda values: -float(values.mean()))
    swings = {gpu: one for gpu, one in evidence.swings.of_gpus.items() if gpu in curves and one.depth >= LEAST_DEPTH}
    deepest = max(swings, key=lambda gpu: swings[gpu].depth, default=None)
    is_short = deepest is not None and swings[deepest].period_s < _RULED_FRAC * axis.span_s
    height = max(_LEAST_HEIGHT, _HEIGHT // len(curves))
    charts = []
    for gpu, (at_s, values) in curves.items():
        who = f"GPU {named(gpu)}"
        told = f"{who}: mean {values.mean():.3g} %, from {values.min():.3g} to {values.max():.3g}"
        levels, notes = list[LevelLine](), list[Note]()
        if gpu == deepest:
            swing = swings[gpu]
            levels = _levels(swing)
            notes = [] if is_short else [_ruler(at_s, values, swing)]
            period = show_duration(swing.period_s)
            told += f"; it swings between {swing.low:.0f} and {swing.high:.0f} %, every {period}"
        curve = binned(at_s, values).curve(what, "accent")
        about = f"{what[0].upper()}{what[1:]} over time. {told}."
        shown = {"title": who * (len(curves) > 1), "is_labelled": gpu == list(curves)[-1], "height": height}
        top = 120.0 if notes else 100.0
        charts.append(axis.chart("%", [curve], top, about, levels=levels, notes=notes, **shown))
    caption = of_many(max(len(at_s) for at_s, _ in curves.values()), "reading")
    if num_gpus > len(curves):
        caption = f"The {len(curves)} of {num_gpus:,} GPUs that were idle most. {caption}".rstrip()
    yield PagePicture("Utilisation", charts, caption=caption)
    if is_short and deepest is not None:
        yield _latest(deepest, *curves[deepest], swings[deepest])


def _latest(gpu: int, at_s: Series, values: Series, swing: Swing) -> PagePicture:
    """Draws the last periods of a swing that is too short for the picture of the whole run."""
    latest = at_s >= at_s[-1] - PERIODS * swing.period_s
    at_s, values = at_s[latest], values[latest]
    on = f" of GPU {named(gpu)}" if gpu else ""
    chart = Chart(
        unit="%",
        axis=Axis(float(at_s[0]), float(at_s[-1]), "since the run started", "time"),
        curves=[binned(at_s, values).curve("utilisation", "accent")],
        top=120.0,
        told=f"The last {PERIODS} periods of the swing{on}, each of {show_duration(swing.period_s)}.",
        levels=_levels(swing),
        notes=[_ruler(at_s, values, swing)],
    )
    return PagePicture(f"The last {PERIODS} periods{on}", [chart])


def _levels(swing: Swing) -> list[LevelLine]:
    """Returns the levels between which it swings."""
    names = ("levels of its swing", "")
    pairs: Sequence[tuple[str, float]] = list(zip(names, (swing.low, swing.high), strict=True))
    return [LevelLine(name, level, "bad", "dashed", f"{level:.0f} %") for name, level in pairs]


def _ruler(at_s: Series, values: Series, swing: Swing) -> Note:
    """Returns a ruler over a real period in the middle."""
    middle = (swing.low + swing.high) / 2
    rises = at_s[1:][(values[1:] >= middle) & (values[:-1] < middle)]
    begin_s = float(rises[len(rises) // 2]) if len(rises) else float(at_s[0])
    begin_s = min(begin_s, float(at_s[-1]) - swing.period_s)
    text = show_duration(swing.period_s)
    return Note(begin_s, swing.high + 9, text, "bad", until=float(np.add(begin_s, swing.period_s)))
