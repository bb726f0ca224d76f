"""Draws single steps on a time line, so that what overlaps is seen as far as steps.csv has it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.step_times import OTHER, phases_ms
from wellfed.explain.pages.chart import Bar, Colour, Key, PagePicture, bars
from wellfed.explain.report.pictures.step_time_picture import PARTS, colour_of, parts_of
from wellfed.units import show_ms

SHOWN = 20
"""Steps in the picture; a run with fewer measured steps has none."""
_HISTORY = 200
"""Earlier steps whose marks tell how far the device's clock is behind the host's."""
_IN_ORDER = ("host", "wait", "copy", "compute", "forward", "backward", OTHER, "optimizer")
"""Kinds of time as they follow each other; several micro-batches are drawn as one."""
_LEAST_FRAC, _PRECISE_FRAC = 1 / 2000, 1 / 10
"""Shortest part drawn, as a share of the picture, and largest error of a time, as a share of a step."""
_Stretch = tuple[float, float, Colour, str]
"""Begin and end in ms, colour, and text."""


def timeline(evidence: Evidence) -> Iterator[PagePicture]:
    """Draws 20 steps in a row that take as long as most: what each waited for and computed, and the host's launches."""
    names, steps = ("step", "time_s", *(f"{name}_ms" for name in PARTS)), evidence.steps
    columns = {name: np.nan_to_num(evidence.all_steps.get(name, np.empty(0))) for name in names}
    number, total_ms = len(columns["step"]), steps.all_ms
    if number < SHOWN or any(len(column) not in (0, number) for column in (*columns.values(), total_ms)):
        return
    first = _usual(total_ms, steps.all_gap_ms, steps.is_warmup)
    if first is None:
        return
    shown = range(first, first + SHOWN)
    # The resolution of a time in steps.csv: six digits, and milliseconds at least.
    last_s = max(float(columns["time_s"][-1]), 1e-3)
    error_ms = 1e3 * min(1e-3, 10.0 ** (math.floor(math.log10(last_s)) - 5))
    is_precise = error_ms <= _PRECISE_FRAC * float(total_ms[shown].mean())
    earliest = max(0, first - _HISTORY)
    ended_ms = np.full(number, np.nan)
    ended_ms[earliest:] = _ended(total_ms[earliest:], 1e3 * columns["time_s"][earliest:], is_precise=is_precise)
    phases = phases_ms(evidence.all_steps, timed_only=True)
    parts_ms = parts_of(evidence, phases)
    begin_ms, end_ms = float(ended_ms[first] - total_ms[first]), float(ended_ms[shown[-1]])
    if not end_ms > begin_ms:
        return
    of_steps: list[_Stretch] = []
    parts: list[_Stretch] = []
    for place in shown:
        ended, took, which = float(ended_ms[place]), float(total_ms[place]), f"step {columns['step'][place]:.0f}"
        of_steps.append((ended - took, ended, ("line", "soft")[place % 2], f"{which} {show_ms(took)}"))
        at_ms = ended - took
        for name in _IN_ORDER:
            if name in parts_ms:
                took = float(parts_ms[name][place])
                parts.append((at_ms, at_ms + took, colour_of(name), f"{which}: {name} {show_ms(took)}"))
                at_ms += took
    rows = [("step", of_steps), ("device" if evidence.on_gpu else "CPU", parts)]
    keys = [Key(colour_of(name), name, "area") for name, ms in parts_ms.items() if ms[shown].any()]
    launch_ms = evidence.all_steps.get("launch_ms", np.empty(0))
    if evidence.on_gpu and is_precise and len(launch_ms) == number and np.isfinite(launch_ms[shown]).all():
        rows.append(("host", _launches(columns, np.nan_to_num(launch_ms), begin_ms, end_ms)))
        keys.append(Key("good", "launching a step's kernels", "area"))
    whole = int(np.count_nonzero(parts_ms["compute"][shown])) if phases and "compute" in parts_ms else 0
    lasted = show_ms(end_ms - begin_ms)
    which = f"Steps {columns['step'][first]:.0f} to {columns['step'][shown[-1]]:.0f}"
    image = bars([Bar(name, _filled(row, begin_ms, end_ms)) for name, row in rows], f"{which}, {lasted}.")
    caption = " ".join(
        [f"{which} took {lasted}, the median of all {SHOWN} steps in a row.", *_notes(evidence, rows, shown, whole)]
    )
    yield PagePicture(f"{SHOWN} steps", image=image, caption=caption, more_keys=keys)


def _usual(total_ms: Series, gap_ms: Series, is_warmup: npt.NDArray[np.bool_]) -> int | None:
    """Returns the first of those steps in a row that together take the median time; None if all have warm-up."""
    sums, warm = (np.concatenate([[0.0], np.cumsum(one)]) for one in (total_ms + gap_ms, is_warmup))
    firsts = np.flatnonzero(warm[SHOWN:] == warm[:-SHOWN])
    if not len(firsts):
        return None
    lasted_ms = (sums[SHOWN:] - sums[:-SHOWN])[firsts] - gap_ms[firsts]  # without what lay before the first
    middle = (len(lasted_ms) - 1) // 2
    return int(firsts[np.argpartition(lasted_ms, middle)[middle]])


def _ended(total_ms: Series, time_ms: Series, *, is_precise: bool) -> Series:
    """Returns the end of each step on the host's clock.

    ``time_s`` of a GPU's step is when the host had launched it. The device ends it then or later, so its own clock is
    set as early as that allows. Pauses between steps are gaps.
    """
    lasted_ms = np.cumsum(total_ms)
    return lasted_ms + np.maximum.accumulate(time_ms - lasted_ms) if is_precise else lasted_ms


def _launches(columns: Mapping[str, Series], launch_ms: Series, begin_ms: float, end_ms: float) -> list[_Stretch]:
    """Returns the launches of the host in this time, which may be of later steps."""
    launched_ms = 1e3 * columns["time_s"]
    shown = (launched_ms > begin_ms) & (launched_ms - launch_ms < end_ms)
    launches = zip(*(column[shown].tolist() for column in (columns["step"], launched_ms, launch_ms)), strict=True)
    return [(end - took, end, "good", f"step {step:.0f}: launching {show_ms(took)}") for step, end, took in launches]


def _filled(row: Sequence[_Stretch], begin_ms: float, end_ms: float) -> list[tuple[Colour, float, str]]:
    """Returns the parts of a bar, with empty ones between the stretches."""
    found: list[tuple[Colour, float, str]] = []
    at_ms, least_ms = begin_ms, _LEAST_FRAC * (end_ms - begin_ms)
    for begun_ms, ended_ms, colour, text in row:
        from_ms, until_ms = max(at_ms, begun_ms), min(ended_ms, end_ms)
        if until_ms - from_ms < least_ms:
            continue
        if from_ms - at_ms >= least_ms:
            found.append(("wash", from_ms - at_ms, ""))
            at_ms = from_ms
        found.append((colour, until_ms - at_ms, text))
        at_ms = until_ms
    return found


def _notes(evidence: Evidence, rows: Sequence[object], shown: range, whole: int) -> Iterator[str]:
    """Yields what the picture can't show. ``whole``: steps whose phases were not timed, although others' were."""
    if whole:
        yield f"Phases were not timed in {whole} of these steps, so their compute is not divided."
    if evidence.on_gpu and len(rows) > 2:
        yield "The device's steps are drawn as early as the host's marks allow."
    build_ms = evidence.all_steps.get("build_ms", np.empty(0))
    if evidence.num_workers and len(build_ms) > shown[-1] and np.isfinite(build_ms[shown]).any():
        mean = show_ms(float(np.nanmean(build_ms[shown])))
        yield f"Workers built each of these batches in {mean} on average; steps.csv does not have when."
