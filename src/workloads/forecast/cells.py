"""Turns cells of text into dates and numbers, and says which can't be read.

Shapes: N cells, U different ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd  # type: ignore[import-untyped]

from workloads.forecast.series import Floats
from workloads.forecast.steps import Dates, Ints

T = TypeVar("T", bound=np.generic)
Bools = npt.NDArray[np.bool_]
Cells = npt.NDArray[np.object_]

MISSING = frozenset(("", "-", "--", ".", "?", "na", "n/a", "nan", "nat", "none", "null", "#n/a", "<na>"))
"""Cells, in small letters, that say that there is no value."""
_YEAR_FIRST = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})(?:[T ]+(\d.*))?")
_YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})[-/.](\d{4})(?:,?[T ]+(\d.*))?")
_OFFSET = re.compile(r"(?<=\d)\s*(Z|UTC|GMT|[+-]\d{2}:?\d{2}|(?<=:\d{2})[+-]\d{2})$", re.IGNORECASE)
_QUARTER = re.compile(r"(\d{4})[- ]?Q([1-4])", re.IGNORECASE)
_ISO_WEEK = re.compile(r"(\d{4})-?W(\d{2})", re.IGNORECASE)
_MONTH_NAME = re.compile(r".*\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b.*", re.IGNORECASE)
_DIGITS = {4: "%Y", 6: "%Y%m", 8: "%Y%m%d", 10: "s", 12: "%Y%m%d%H%M", 13: "ms", 14: "%Y%m%d%H%M%S"}
"""What a number of so many digits says as a date; seconds and milliseconds since 1970, unless they are hours."""
_HOURS = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?:[01]\d|2[0-3])")
"""``2024053118``, as weather services have it. In a column of seconds since 1970 hardly a number looks like that."""
_POINT = re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(,\d{3})+)?(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
_COMMA = re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(\.\d{3})+)?(,\d*)?(e[+-]?\d+)?", re.IGNORECASE)
LARGEST = 1e30
"""Beyond it nothing is read as a number: in float32 it could not be reckoned with."""
SAMPLE = 1000
"""Cells by which a column is judged."""
_SPACES = re.compile(r"(?<=\d)[ \u00a0\u202f'](?=\d{3})")


class Unclear(ValueError):
    """Cells may be read in more ways than one; says what to write, and names no file."""


def parse_dates(cells_N: Sequence[str], day_first: bool | None = None) -> tuple[Dates, tuple[str, ...]]:
    """The date of each cell, NaT where there is none, and what is to be said of them.

    Args:
        day_first: how ``03/04/2024`` is meant; None = as the others tell.

    Raises:
        Unclear: which is the day and which the month, or only some cells have a UTC offset.
    """
    code_N, different = coded(cells_N)
    cell_U = np.array(different, dtype=object)
    local_U, notes = _without_offsets(cell_U)
    date_U = _iso(local_U)
    order: bool | None = None
    ten_digits = [cell for cell in local_U if len(cell) == 10 and cell.isdigit()]
    has_hours = 2 * sum(bool(_HOURS.fullmatch(cell)) for cell in ten_digits) > len(ten_digits)
    for number in np.flatnonzero(np.isnat(date_U)):
        cell = local_U[number]
        if found := _YEAR_LAST.fullmatch(cell):
            if order is None:
                order = _day_comes_first(local_U, day_first)
                notes = (*notes, f"dates such as {cell} read with the {'day' if order else 'month'} first")
            first, second = (found[3], found[1]) if order else (found[1], found[3])
            date_U[number] = _of_text(f"{found[4]}-{first:0>2}-{second:0>2}T{_time(found[5])}")
        else:
            date_U[number] = _other(cell, has_hours)
    return date_U[code_N], notes


def _without_offsets(cell_U: Cells) -> tuple[Cells, tuple[str, ...]]:
    """Local times where all have one and the same offset from UTC, else times in UTC."""
    found = [_OFFSET.search(cell) if ":" in cell else None for cell in cell_U]
    offsets = {each[1].upper() for each in found if each}
    if not offsets:
        return cell_U, ()
    timed = [number for number, cell in enumerate(cell_U) if ":" in cell]
    without = next((number for number in timed if found[number] is None), None)
    if without is not None:
        raise Unclear(
            f"Some dates have a UTC offset ({cell_U[next(n for n in timed if found[n])]}), and others none "
            f"({cell_U[without]}). Write all of them in one way."
        )
    bare = [cell[: each.start()] if each else cell for cell, each in zip(cell_U, found, strict=True)]
    if len(offsets) == 1:
        return np.array(bare, dtype=object), ()
    local_U = _iso(np.array(bare, dtype=object))
    shift_U = np.array([_minutes(each[1]) if each else 0 for each in found], dtype="m8[m]")
    in_utc = ["" if np.isnat(date) else str(date) for date in local_U - shift_U]
    return np.array(in_utc, dtype=object), ("dates have several UTC offsets; all are taken as UTC",)


def _minutes(offset: str) -> int:
    if offset[0] not in "+-":
        return 0
    digits = offset[1:].replace(":", "").ljust(4, "0")
    return int(offset[0] + "1") * (int(digits[:2]) * 60 + int(digits[2:]))


def _iso(cell_U: Cells) -> Dates:
    """Of cells as ``2024-05-31``, with or without a time; NaT for all others, numbers among them."""
    plain_U = np.array([cell if not cell.isdigit() else "" for cell in cell_U], dtype=object)
    parsed = pd.to_datetime(pd.Series(plain_U), format="ISO8601", errors="coerce", utc=True)
    date_U: Dates = parsed.dt.tz_localize(None).to_numpy().astype("M8[us]")
    return date_U


def _day_comes_first(cell_U: Cells, day_first: bool | None) -> bool:
    """Whether ``03/04/2024`` is of April."""
    if day_first is not None:
        return day_first
    found = [each for each in map(_YEAR_LAST.fullmatch, cell_U) if each]
    if any(each[2] == "." for each in found):
        return True
    days_first = sum(int(each[1]) > 12 for each in found)
    months_first = sum(int(each[3]) > 12 for each in found)
    if days_first == months_first:
        raise Unclear(
            f"Dates such as {found[0][0]} may have the day or the month first, and no other tells which. "
            "Write workload.data.day_first=true or workload.data.day_first=false."
        )
    return days_first > months_first


def _other(cell: str, has_hours: bool) -> np.datetime64:
    """A date written in a way that needs no other to be read, but for what 10 digits are; NaT if it is none."""
    if cell.isascii() and cell.isdigit():
        return _of_digits(cell, has_hours)
    if found := _YEAR_FIRST.fullmatch(cell):
        return _of_text(f"{found[1]}-{found[2]:0>2}-{found[3]:0>2}T{_time(found[4])}")
    if found := _QUARTER.fullmatch(cell):
        return _of_text(f"{found[1]}-{3 * int(found[2]) - 2:02}-01")
    if found := _ISO_WEEK.fullmatch(cell):
        try:
            return np.datetime64(datetime.fromisocalendar(int(found[1]), int(found[2]), 1), "us")
        except ValueError:
            return np.datetime64("NaT", "us")
    if _MONTH_NAME.fullmatch(cell) and re.search(r"\b\d{4}\b", cell):
        return _of_text(cell)
    return np.datetime64("NaT", "us")


def _of_digits(cell: str, has_hours: bool) -> np.datetime64:
    form = "%Y%m%d%H" if has_hours and len(cell) == 10 else _DIGITS.get(len(cell))
    if form in ("s", "ms"):
        return np.datetime64(int(cell) * (1_000_000 if form == "s" else 1000), "us")
    try:
        return np.datetime64(datetime.strptime(cell, form or "%Y"), "us")
    except ValueError:
        return np.datetime64("NaT", "us")


def _time(text: str | None) -> str:
    """A time of day with two digits for the hour."""
    return "00:00" if not text else f"0{text}" if text[1:2] == ":" else text


def _of_text(text: str) -> np.datetime64:
    try:
        return np.datetime64(pd.Timestamp(text).to_datetime64(), "us")
    except ValueError:
        return np.datetime64("NaT", "us")


def coded(cells_N: Sequence[str]) -> tuple[Ints, list[str]]:
    """The different cells in order, and which of them each one is."""
    code_N, cell_U = pd.factorize(np.array(cells_N, dtype=object), sort=True)
    return code_N.astype(np.int64), [str(cell) for cell in cell_U]


def different(values_N: npt.NDArray[T]) -> npt.NDArray[T]:
    """Each once."""
    value_U: npt.NDArray[T] = pd.unique(values_N)
    return value_U


def is_missing(cells_N: Sequence[str]) -> Bools:
    """Whether each cell says that there is no value."""
    return np.fromiter((cell.lower() in MISSING for cell in cells_N), bool, len(cells_N))


def looks_like_dates(cells_N: Sequence[str], numbers_too: bool = False) -> bool:
    """Whether most of the first cells are dates; of plain numbers those of 8 digits alone, unless ``numbers_too``."""
    sample = [cell for cell in cells_N[:SAMPLE] if cell.lower() not in MISSING]
    if not numbers_too and any(cell.isdigit() and len(cell) != 8 for cell in sample):
        return False
    try:
        date_N, _ = parse_dates(sample)
    except Unclear:
        return True
    return 2 * int((~np.isnat(date_N)).sum()) > len(sample)


def looks_like_numbers(cells_N: Sequence[str]) -> bool:
    """Whether most of the first cells are numbers, in any style; an empty column does."""
    sample = [_SPACES.sub("", cell) for cell in cells_N[:SAMPLE] if cell.lower() not in MISSING]
    fits = sum(bool(_POINT.fullmatch(cell) or _COMMA.fullmatch(cell)) for cell in sample)
    return 2 * fits >= len(sample)


def parse_numbers(columns: Sequence[Sequence[str]], decimal: str | None = None) -> list[Floats]:
    """The number of each cell of some columns, NaN where there is none.

    Args:
        decimal: ``.`` or ``,`` before tenths; the other one then parts thousands. None = as the cells tell.

    Raises:
        Unclear: the cells leave it open.
    """
    commas = [cell for column in columns for cell in column if "," in cell]
    if not commas and decimal != ",":
        return [_numbers(column) for column in columns]
    cells = commas if decimal else [_SPACES.sub("", cell) for column in columns for cell in column]
    style = decimal or _decimal(cells, commas[0])
    form, away = (_COMMA, ".") if style == "," else (_POINT, ",")
    return [_numbers([_plain(cell, form, away, style) for cell in column]) for column in columns]


def _decimal(cells: list[str], example: str) -> str:
    points, commas = (sum(bool(form.fullmatch(cell)) for cell in cells) for form in (_POINT, _COMMA))
    if points == commas:
        raise Unclear(
            f"Values such as {example} may have the comma before tenths or between thousands, and no other tells "
            "which. Write workload.data.decimal=',' or workload.data.decimal='.'."
        )
    return "." if points > commas else ","


def _plain(cell: str, form: re.Pattern[str], away: str, decimal: str) -> str:
    """The number as Python writes it; ``no number`` if it is none in this form."""
    bare = _SPACES.sub("", cell)
    return bare.replace(away, "").replace(decimal, ".") if form.fullmatch(bare) else "no number"


def _numbers(cells_N: Sequence[str]) -> Floats:
    value_N: Floats = _floats(cells_N).copy()
    failed = np.flatnonzero(np.isnan(value_N))
    value_N[failed] = _floats([_SPACES.sub("", cells_N[number]) for number in failed.tolist()])
    value_N[~(np.abs(value_N) <= LARGEST)] = np.nan
    return value_N


def _floats(cells_N: Sequence[str]) -> Floats:
    value_N: Floats = pd.to_numeric(pd.Series(cells_N, dtype=object), errors="coerce").to_numpy(np.float64)
    return value_N
