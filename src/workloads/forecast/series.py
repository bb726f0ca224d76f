"""Holds series of one frequency, fills their gaps, and splits each by time.

Shapes: S series, T steps of one series.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from wellfed import DataError
from wellfed.units import counted, show_count
from workloads.forecast.steps import Frequency, show_date

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
FillName = Literal["none", "forward", "linear", "zero"]


@dataclass(frozen=True)
class SeriesSet:
    """One or many series; each begins and ends with a value."""

    names: list[str]
    values: list[Floats]
    """Values [T] of each series, NaN if missing."""
    starts: list[int]
    """First step of each series, counted by the frequency."""
    frequency: Frequency
    notes: tuple[str, ...] = ()
    source: str = "The embedded set"
    """Name of the file, for errors."""


@dataclass(frozen=True)
class Parts:
    """Ends of the parts of one series, in steps from its beginning."""

    train_end: int
    val_end: int
    """Beginning of the test part."""
    end: int


def trimmed(
    names: list[str],
    values: list[Floats],
    frequency: Frequency,
    starts: Sequence[int] | None = None,
    notes: tuple[str, ...] = (),
    source: str = "The embedded set",
) -> SeriesSet:
    """Cuts each series to its first and last value, and drops series without values, with a note.

    Args:
        starts: first step of each series; None = 0.
    """
    seen = [np.flatnonzero(~np.isnan(each)) for each in values]
    kept = [number for number, known in enumerate(seen) if len(known)]
    if len(kept) < len(names):
        first = next(name for name, known in zip(names, seen, strict=True) if not len(known))
        notes += (f"{len(names) - len(kept)} of {len(names)} series without any value left out, the first: {first}",)
    return SeriesSet(
        [names[number] for number in kept],
        [values[number][seen[number][0] : seen[number][-1] + 1] for number in kept],
        [int(seen[number][0]) + (starts[number] if starts else 0) for number in kept],
        frequency,
        notes,
        source,
    )


def cut_by_time(num_steps: int, horizon: int, val_frac: float, test_frac: float) -> Parts:
    """Returns the parts of a series: ``test_frac`` at the end, ``val_frac`` before it. Both are whole horizons, at
    least one unless the fraction is 0."""
    held = [max(1, round(frac * num_steps / horizon)) * horizon if frac else 0 for frac in (val_frac, test_frac)]
    return Parts(num_steps - sum(held), num_steps - held[1], num_steps)


def split_by_time(
    found: SeriesSet, *, horizon: int, shortest: int, val_frac: float, test_frac: float
) -> tuple[SeriesSet, list[Parts]]:
    """Returns the series that are long enough to train on, and the parts of each.

    Args:
        shortest: steps of the shortest window.

    Raises:
        DataError: no series is long enough.
    """
    parts = [cut_by_time(len(values), horizon, val_frac, test_frac) for values in found.values]
    kept = [number for number, each in enumerate(parts) if each.train_end >= shortest + horizon]
    if not kept:
        longest = max(range(len(parts)), key=lambda number: len(found.values[number]))
        steps = len(found.values[longest])
        held = steps - parts[longest].train_end
        raise DataError(
            f"{found.source}: no series is long enough. The longest, {found.names[longest]!r}, has "
            f"{counted(steps, 'step')} of {found.frequency.name}, and training takes a window of {shortest} and a "
            f"horizon of {horizon}, with {show_count(held)} steps held out after them (val_frac, test_frac). Give "
            "longer series, or smaller workload.data.windows, horizon, val_frac or test_frac."
        )
    notes = list(found.notes)
    if left_out := len(parts) - len(kept):
        first = next(number for number in range(len(parts)) if number not in set(kept))
        notes.append(
            f"{left_out} of {len(parts)} series too short and left out, the first: {found.names[first]} "
            f"({counted(len(found.values[first]), 'step')})"
        )
    of = replace(
        found,
        names=[found.names[number] for number in kept],
        values=[found.values[number] for number in kept],
        starts=[found.starts[number] for number in kept],
        notes=tuple(notes),
    )
    return of, [parts[number] for number in kept]


def filled(found: SeriesSet, parts: list[Parts], fill: FillName, horizon: int) -> SeriesSet:
    """Fills the gaps of the series, and adds a note with their number.

    Filled steps count as known, but evaluation does not score them. A gap is interpolated only if no evaluated forecast
    begins in it, since the line would reveal the next value. Otherwise the last value is kept.
    """
    gaps = [int(np.isnan(values).sum()) for values in found.values]
    if not any(gaps):
        return found
    first = next(number for number, count in enumerate(gaps) if count)
    step = int(np.isnan(found.values[first]).argmax()) + found.starts[first]
    date = show_date(found.frequency.dates(np.array([step]))[0])
    what = (
        "left out of loss and scores; workload.data.fill=forward, linear or zero would fill them"
        if fill == "none"
        else f"filled (workload.data.fill={fill})"
    )
    note = (
        f"{show_count(sum(gaps))} of {counted(sum(map(len, found.values)), 'step')} missing, in "
        f"{sum(count > 0 for count in gaps)} of {len(gaps)} series, the first: {found.names[first]}, {date}; {what}"
    )
    values = [_fill(each, fill, cut, horizon) for each, cut in zip(found.values, parts, strict=True)]
    return replace(found, values=values, notes=(*found.notes, note))


def _fill(value_T: Floats, fill: FillName, parts: Parts, horizon: int) -> Floats:
    missing_T = np.isnan(value_T)
    if fill == "none" or not missing_T.any():
        return value_T
    if fill == "zero":
        return np.where(missing_T, 0.0, value_T)
    last_T = np.maximum.accumulate(np.where(missing_T, 0, np.arange(len(value_T))))
    forward_T = value_T[last_T]
    if fill == "forward":
        return forward_T
    return np.where(_ends_unseen(missing_T, parts, horizon), forward_T, _lines(value_T, missing_T))


def _lines(value_T: Floats, missing_T: Flags) -> Floats:
    step_T, known = np.arange(len(value_T)), ~missing_T
    return np.interp(step_T, step_T[known], value_T[known])


def _ends_unseen(missing_T: Flags, parts: Parts, horizon: int) -> Flags:
    """Marks missing steps with an evaluated forecast that begins before the next value."""
    step_T = np.arange(len(missing_T))
    next_T = np.minimum.accumulate(np.where(missing_T, len(missing_T), step_T)[::-1])[::-1]
    is_origin_T = (step_T >= parts.train_end) & ((step_T - parts.train_end) % horizon == 0)
    origins_until_T = np.cumsum(is_origin_T)
    return missing_T & (origins_until_T[np.minimum(next_T, len(step_T) - 1)] > origins_until_T[step_T])
