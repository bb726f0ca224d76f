"""Numbers the steps of evenly spaced dates, and locates each date in its day, week and year.

Shapes: N dates or steps, K calendar periods, P phases of all periods together.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wellfed.units import counted

Dates = npt.NDArray[np.datetime64]
"""Dates in microseconds, without a time zone."""
Ints = npt.NDArray[np.int64]

MINUTE = 60_000_000
"""A minute in microseconds, the unit of all durations here."""
HOUR, DAY = 60 * MINUTE, 1440 * MINUTE
WEEK = 7 * DAY
CLOCKS_SET_BACK_BY = 4 * HOUR
"""Latest time of day at which a repeated hour begins. Some countries set clocks back before midnight."""
CLOCK_CHANGES_APART = 300 * DAY
"""Minimum distance between two changes to winter time; real ones are at least 350 days apart."""
_UNITS = {"year": 365 * DAY, "week": WEEK, "day": DAY, "hour": HOUR, "minute": MINUTE, "second": 1_000_000}
_ALIASES: dict[str, tuple[Literal["time", "months", "business"], int]] = {
    "us": ("time", 1), "ms": ("time", 1000), "s": ("time", 1_000_000), "sec": ("time", 1_000_000),
    "min": ("time", MINUTE), "t": ("time", MINUTE), "h": ("time", HOUR), "d": ("time", DAY), "w": ("time", WEEK),
    "b": ("business", 1), "m": ("months", 1), "ms_": ("months", 1), "me": ("months", 1), "q": ("months", 3),
    "qs": ("months", 3), "qe": ("months", 3), "y": ("months", 12), "ys": ("months", 12), "ye": ("months", 12),
    "a": ("months", 12)
}  # fmt: skip


class UnevenDates(ValueError):
    """Raised for dates that fit no frequency; ``date`` is the first that does not fit."""

    def __init__(self, message: str, date: np.datetime64) -> None:
        super().__init__(message)
        self.date = date


@dataclass(frozen=True)
class Frequency:
    """A frequency: a fixed duration, some months, or every business day (Monday to Friday)."""

    kind: Literal["time", "months", "business"]
    every: int
    """Microseconds, or months; 1 for business days."""
    first: np.datetime64
    """Date of step 0, in microseconds."""
    day: int = 1
    """Day of the month, for months; 31 = the last day."""

    @property
    def name(self) -> str:
        """Name for messages: ``1 day``, ``15 minutes``, ``3 months``, ``1 business day``."""
        if self.kind == "business":
            return "1 business day"
        if self.kind == "months":
            return counted(self.every // 12, "year") if self.every % 12 == 0 else counted(self.every, "month")
        return show_time(self.every)

    @property
    def season(self) -> int:
        """Steps of the main season: a day for hours, a week for days, a year for weeks and months; 1 = none."""
        if self.kind == "business":
            return 5
        if self.kind == "months":
            return 12 // self.every if 12 % self.every == 0 else 1
        if self.every < 1_000_000:
            return 1
        if self.every >= WEEK:
            return max(1, round(365.25 * DAY / self.every))
        period = HOUR if self.every < MINUTE else DAY if self.every < DAY else WEEK
        return period // self.every if period % self.every == 0 else 1

    def numbers(self, dates_N: Dates) -> Ints:
        """Returns the step of each date, counted from ``first``. Dates between two steps belong to the earlier one."""
        if self.kind == "time":
            return (dates_N - self.first).astype(np.int64) // self.every
        if self.kind == "months":
            return (months_of(dates_N) - months_of(np.array([self.first]))) // self.every
        days_N = np.busday_offset(dates_N.astype("M8[D]"), 0, roll="backward")
        numbers_N: Ints = np.busday_count(self.first.astype("M8[D]"), days_N).astype(np.int64)
        return numbers_N

    def dates(self, numbers_N: Ints) -> Dates:
        """Returns the date of each step."""
        if self.kind == "time":
            return self.first + numbers_N * np.timedelta64(self.every, "us")
        if self.kind == "months":
            months = self.first.astype("M8[M]") + numbers_N * np.timedelta64(self.every, "M")
            days_N = months.astype("M8[D]") + (np.minimum(self.day, days_in(months)) - 1).astype("m8[D]")
        else:
            days_N = np.busday_offset(self.first.astype("M8[D]"), numbers_N, roll="backward")
        time_of_day = self.first - self.first.astype("M8[D]")
        dates_N: Dates = days_N.astype("M8[us]") + time_of_day
        return dates_N


def show_time(length: int) -> str:
    """Returns a duration in the largest unit that divides it: ``1 day``, ``90 minutes``."""
    for noun, unit in _UNITS.items():
        if noun != "year" and length >= unit and length % unit == 0:
            return counted(length // unit, noun)
    return f"{length / 1e6:g} seconds"


def months_of(dates_N: Dates) -> Ints:
    """Returns the months since 1970."""
    return dates_N.astype("M8[M]").astype(np.int64)


def days_in(months_N: Dates) -> Ints:
    """Returns the number of days of each month (``datetime64[M]``)."""
    next_N = months_N + np.timedelta64(1, "M")
    days: Ints = (next_N.astype("M8[D]") - months_N.astype("M8[D]")).astype(np.int64)
    return days


def parse_frequency(text: str, first: np.datetime64) -> Frequency:
    """Returns the frequency for a code such as ``D``, ``15min``, ``B`` or ``M``; step 0 contains ``first``.

    Raises:
        ValueError: unknown code.
    """
    found = re.fullmatch(r"\s*(\d*)\s*([a-z]+)(-[a-z]{3})?\s*", text, flags=re.IGNORECASE)
    word = "" if found is None else "ms_" if found[2] == "MS" else found[2].lower()
    count = int(found[1] or 1) if found else 0
    if word not in _ALIASES or count < 1 or (word == "b" and count > 1):
        raise ValueError(f"{text!r} is none of s, min, h, D, B (business days), W, M, Q, Y, with a number before it")
    kind, unit = _ALIASES[word]
    every = count * unit
    if kind == "months":
        return Frequency(kind, every, first.astype("M8[M]").astype("M8[us]"))
    start = first.astype("M8[D]").astype("M8[us]")
    if kind == "time" and DAY % every == 0:
        start += (first - start).astype(np.int64) // every * np.timedelta64(every, "us")
    if kind == "business":
        start = np.busday_offset(start.astype("M8[D]"), 0, roll="backward").astype("M8[us]")
    return Frequency(kind, every, start)


def infer_frequency(dates_N: Dates) -> Frequency:
    """Returns the frequency of the dates; steps may be missing.

    Args:
        dates_N: ascending and distinct.

    Raises:
        UnevenDates: no frequency fits.
    """
    if len(dates_N) < 2:
        raise UnevenDates(f"{show_date(dates_N[0])} is the only date, and a series needs several.", dates_N[0])
    first, days = dates_N[0], dates_N.astype("M8[D]")
    gaps = np.diff(dates_N).astype(np.int64)
    months = months_of(dates_N)
    day_of_month = (days - days.astype("M8[M]")).astype(np.int64) + 1
    fits_day = day_of_month == np.minimum(day_of_month.max(), days_in(dates_N.astype("M8[M]")))
    has_one_time = len(np.unique(dates_N - days)) == 1
    if fits_day.all() and has_one_time and np.diff(months).min() > 0 and gaps.min() >= 28 * DAY:
        return Frequency("months", int(np.gcd.reduce(np.diff(months))), first, int(day_of_month.max()))
    lengths, counts = np.unique(gaps, return_counts=True)
    usual = int(lengths[counts.argmax()])
    if usual == DAY and np.is_busday(days).all() and dates_N[-1] - first >= np.timedelta64(7, "D"):
        return Frequency("business", 1, first)
    for every in (usual, int(lengths[0])):
        if not ((dates_N - first).astype(np.int64) % every).any():
            return Frequency("time", every, first)
    off = int(np.flatnonzero((dates_N - first).astype(np.int64) % usual)[0])
    raise UnevenDates(
        f"the dates are not even: most are {show_time(usual)} apart, counted from {show_date(first)}, but not "
        f"{show_date(dates_N[off])}. Correct it, or write workload.data.frequency=D (or h, W, M ...) to round all "
        "dates down.",
        dates_N[off],
    )


def show_date(date: np.datetime64) -> str:
    """Returns ``2024-05-31``, with the time unless it is midnight."""
    text = str(date.astype("M8[us]"))
    return text.removesuffix(".000000").removesuffix("T00:00:00").replace("T", " ")


def clock_set_back(doubled_N: Dates) -> npt.NDArray[np.bool_]:
    """Marks dates repeated because a clock was set back: at most an hour, at night, once a year.

    Args:
        doubled_N: repeated dates of a series, ascending and distinct.
    """
    gaps = np.diff(doubled_N).astype(np.int64)
    night_N = np.concatenate([[0], np.cumsum(gaps >= HOUR)])
    edges = np.searchsorted(night_N, np.arange(night_N[-1] + 2))
    begins, ends = doubled_N[edges[:-1]], doubled_N[edges[1:] - 1]
    time_of_day = (begins - begins.astype("M8[D]")).astype(np.int64)
    is_at_night = (time_of_day < CLOCKS_SET_BACK_BY) | (time_of_day >= DAY - HOUR)
    apart = np.diff(begins).astype(np.int64) >= CLOCK_CHANGES_APART
    is_rare = np.concatenate([[True], apart]) & np.concatenate([apart, [True]])
    fits = is_at_night & is_rare & ((ends - begins).astype(np.int64) < HOUR)
    fits_N: npt.NDArray[np.bool_] = fits[night_N]
    return fits_N


class Calendar:
    """Sine and cosine of the position in day, week and year, if steps are short enough."""

    def __init__(self, frequency: Frequency) -> None:
        is_months = frequency.kind == "months"
        length = frequency.every * 30 * DAY if is_months else DAY if frequency.kind == "business" else frequency.every
        sizes = {"day": (DAY, 1440), "week": (WEEK, 168), "year": (365 * DAY, 366)}
        self.periods = tuple(name for name, (period, _) in sizes.items() if 2 * length <= period)
        counts = [sizes[name][1] for name in self.periods]
        rows = [np.arange(count) / (365.25 if count == 366 else count) for count in counts]
        angle_P = torch.from_numpy(2 * math.pi * np.concatenate([*rows, np.zeros(0)]))
        self.table_P2 = torch.stack([angle_P.sin(), angle_P.cos()], dim=1).float()
        """Sine and cosine of each phase. Equal phases give equal numbers by lookup."""

    def phases(self, dates_N: Dates) -> Tensor:
        """Returns the rows of ``table_P2`` for each date, int16 [N, K]."""
        days = dates_N.astype("M8[D]")
        minute = (dates_N - days).astype(np.int64) // MINUTE
        weekday = (days.astype(np.int64) + 3) % 7  # 1970 began on a Thursday
        of: dict[str, Any] = {
            "day": (1440, minute),
            "week": (168, weekday * 24 + minute // 60),
            "year": (366, (days - days.astype("M8[Y]")).astype(np.int64)),
        }
        columns, start = [], 0
        for name in self.periods:
            columns.append(of[name][1] + start)
            start += of[name][0]
        stacked = np.stack(columns, axis=1) if columns else np.zeros((len(dates_N), 0))
        return torch.from_numpy(stacked.astype(np.int16))
