"""Draws what steps took over time, part upon part, with the warm-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.pages.chart import Colour, Key, PagePicture
from wellfed.explain.report.figures import PARTS, PHASES
from wellfed.explain.report.pictures.picture_parts import TimeAxis, binned
from wellfed.units import counted, show_duration, show_ms

COLOURS: Mapping[str, Colour] = {
    **dict(zip(PARTS, ("one", "two", "three", "four"), strict=True)),
    **dict(zip(PHASES, ("eight", "five", "six", "seven"), strict=True)),
}
"""Colours of the kinds of a step's time, and of the phases of compute."""


def step_time(evidence: Evidence, axis: TimeAxis) -> Iterator[PagePicture]:
    """Draws the parts of a step on top of each other, with the warm-up."""
    table = evidence.all_steps
    at_s, parts = table.get("time_s", np.empty(0)), parts_of(evidence)
    if not parts or len(at_s) != len(next(iter(parts.values()))) or np.isfinite(at_s).sum() < 2:  # an area has a width
        return
    total_ms = np.sum(list(parts.values()), axis=0)
    areas = [binned(at_s, ms, name, COLOURS[name], kind="area") for name, ms in parts.items()]
    # The upper limit of the axis: a few very long steps must not flatten all others.
    is_warmup = evidence.steps.is_warmup
    steady_ms = total_ms if is_warmup.all() else total_ms[~is_warmup]
    usual_ms = np.percentile(binned(at_s, total_ms).y, 95)
    most_ms = max(1e-3, 1.08 * min(float(steady_ms.max()), 2.5 * float(usual_ms)))
    if len(table.get("step", ())) == len(at_s):
        areas.append(binned(at_s, table["step"], "step", kind="told"))
    spans, keys = list(axis.strip), list[Key]()
    if is_warmup.any():
        begins_s = np.maximum(axis.begin_s, at_s - total_ms / 1e3)
        bounds = np.flatnonzero(np.diff(is_warmup, prepend=False, append=False)).reshape(-1, 2)
        spans += [(float(begins_s[begin]), float(at_s[end - 1]), "ink") for begin, end in bounds.tolist()]
        keys.append(Key("ink", "warm-up", "shade"))
    shares = ", ".join(f"{name} {show_ms(ms.mean())}" for name, ms in parts.items())
    told = f"Time of a step over {counted(len(at_s), 'step')}: {shares} on average."
    chart = axis.chart("ms a step", areas, most_ms, told, spans=spans, height=180)
    longest = int(total_ms.argmax())
    told = f"The longest, step {longest + 1}, took {show_duration(total_ms[longest] / 1e3)}."
    caption = told if total_ms[longest] > most_ms else ""
    yield PagePicture("Time of a step", [chart], caption=caption, more_keys=keys)


def parts_of(evidence: Evidence) -> dict[str, Series]:
    """Returns the milliseconds of each kind of time in all steps, without kinds that have no figure."""
    columns = {name: evidence.all_steps.get(f"{name}_ms", np.empty(0)) for name in PARTS}
    return {name: np.nan_to_num(column) for name, column in columns.items() if np.isfinite(column).any()}
