"""Draws how busy each GPU was over time, its swing measured; without a GPU how busy the processor was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from wellfed.explain.diagnosis.curves.swing import LEAST_DEPTH, Swing
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.picture import ACCENT, BAD, INK, picture
from wellfed.explain.report.pictures.picture_parts import (
    PERIODS,
    WIDTH,
    Key,
    PagePicture,
    binned,
    curve,
    measure,
    of_gpus,
    of_host,
    of_many,
    rows,
    scale,
    the_most,
)
from wellfed.explain.report.pictures.time_axis import TimeAxis
from wellfed.observe.telemetry.machines import HOST, named
from wellfed.units import show_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RULED_FRAC = 1 / 16
"""Shortest period drawn over the whole run, as a share of the time."""


def utilisation(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the curve of each GPU, with phases and swing; without a GPU the processor's."""
    what, unit, curves, top = "utilisation", "%", of_gpus(evidence, "util_pct"), 100.0
    if not curves:  # as of a MIG instance
        what, curves = "SMs at work", of_gpus(evidence, "sm_active_pct")
    if not curves:
        what, unit, curves = "CPU of this process and its workers", "cores", of_host(evidence, "cpu_pct")
        curves = {gpu: (at_s, busy_pct / 100) for gpu, (at_s, busy_pct) in curves.items()}
        top = max([evidence.cores or 1.0, *(float(values.max()) for _, values in curves.values())])
    if not curves:
        return
    num_gpus = len(curves)
    curves = the_most(curves, lambda values: -float(values.mean()))
    swings = {gpu: one for gpu, one in evidence.swings_of_gpus.items() if gpu in curves and one.depth >= LEAST_DEPTH}
    deepest = max(swings, key=lambda gpu: swings[gpu].depth, default=None)
    is_short = deepest is not None and swings[deepest].period_s < _RULED_FRAC * axis.span_s
    height = max(0.62, 2.0 / len(curves))
    with picture(WIDTH, 0.85 + height * len(curves) + 1.75 * is_short) as drawn:
        below = rows(drawn.figure, [height] * len(curves) + [1.15] * is_short)
        told = []
        for axes, (gpu, (at_s, values)) in zip(below, curves.items(), strict=False):
            axis.shade(axes)
            curve(axes, binned(axis.scaled(at_s), values))
            scale(axes, top, unit, has_room=len(curves) > 1 or (gpu == deepest and not is_short))
            axis.put_under(axes, is_labelled=axes is below[len(curves) - 1])
            who = "CPU" if gpu == HOST else f"GPU {named(gpu)}"
            if gpu != HOST and len(curves) > 1:
                axes.text(0.006, 0.98, who, transform=axes.transAxes, va="top", weight="bold")
            elif gpu == HOST and evidence.cores:
                axes.axhline(evidence.cores, color=INK, linewidth=1, linestyle=":")
            told.append(f"{who}: mean {values.mean():.3g} {unit}, from {values.min():.3g} to {values.max():.3g}")
            if gpu == deepest:
                _ruler(axes, axis.scaled, at_s, values, swings[gpu], is_period_shown=not is_short)
                told.append(f"it swings between {swings[gpu].low:.0f} and {swings[gpu].high:.0f} %, every "
                            f"{show_duration(swings[gpu].period_s)}")  # fmt: skip
        if is_short and deepest is not None:
            at_s, values = curves[deepest]
            latest = at_s >= at_s[-1] - PERIODS * swings[deepest].period_s
            below[-1].plot(at_s[latest], values[latest], color=ACCENT, linewidth=1.2)
            _ruler(below[-1], np.asarray, at_s[latest], values[latest], swings[deepest], is_period_shown=True)
            on = f" on GPU {named(deepest)}" if deepest else ""
            below[-1].set_xlabel(f"its last {PERIODS} periods{on}, seconds")
            scale(below[-1], top, unit, has_room=True)
        drawn.told = f"{what[0].upper()}{what[1:]} over time. {'; '.join(told)}."
    keys = [Key(ACCENT, what), *axis.keys]
    if deepest is not None:
        keys.append(Key(BAD, "levels of its swing", "dashed"))
    if HOST in curves and evidence.cores:
        keys.append(Key(INK, "cores of this run", "dotted"))
    caption = of_many(max(len(at_s) for at_s, _ in curves.values()), "reading")
    if num_gpus > len(curves):
        caption = f"The {len(curves)} of {num_gpus:,} GPUs that were idle most. {caption}".rstrip()
    yield PagePicture(drawn.svg, keys, caption)


def _ruler(
    axes: Axes, scaled: Callable[[Series], Series], at_s: Series, values: Series, swing: Swing, *, is_period_shown: bool
) -> None:
    """Draws the levels of a swing, and its period over a real one."""
    for level in (swing.low, swing.high):
        axes.axhline(level, color=BAD, linewidth=1, linestyle="--")
        axes.text(
            1.005, level, f"{level:.0f} %", transform=axes.get_yaxis_transform(), va="center", color=BAD, clip_on=False
        )
    if not is_period_shown:
        return
    middle = (swing.low + swing.high) / 2
    rises = at_s[1:][(values[1:] >= middle) & (values[:-1] < middle)]
    begin_s = float(rises[len(rises) // 2]) if len(rises) else float(at_s[0])
    begin_s = min(begin_s, float(at_s[-1]) - swing.period_s)
    begin, end = (float(scaled(np.array(edge_s))) for edge_s in (begin_s, begin_s + swing.period_s))
    measure(axes, begin, end, swing.high + 9, show_duration(swing.period_s))
