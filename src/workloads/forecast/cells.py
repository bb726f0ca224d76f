"""Turns cells of text into dates and numbers with pandas."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

FIRST_YEAR = 1000
"""Earliest accepted year. pandas reads the name of a month alone as a date in year 1."""
LARGEST = 1e30
"""Largest absolute value; larger ones become NaN, since float32 could not hold computed results."""
SAMPLE = 1000
"""Number of first cells that identify a column."""
_NUMBERS = {
    ".": re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(,\d{3})+)?(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE),
    ",": re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(\.\d{3})+)?(,\d*)?(e[+-]?\d+)?", re.IGNORECASE),
}
"""Decimal mark -> pattern of numbers; the other mark groups thousands."""
_SPACES = r"(?<=\d)[ \u00a0\u202f'](?=\d{3})"
"""Blanks and apostrophes that group thousands."""
_WITH_OFFSET = r".*:.*(Z|[+-]\d\d(:?\d\d)?)"


class Unclear(ValueError):
    """Raised for cells with two meanings; the text is the advice, without the file."""


def parse_dates(cells: pd.Series, day_first: bool | None = None) -> tuple[pd.Series, tuple[str, ...]]:
    """Returns the date of each cell, NaT without one, and notes on the format.

    ISO dates are tried first, then the format of the first cell, as pandas infers it.

    Args:
        day_first: whether ``03/04/2024`` is in April; None = inferred from the other dates.

    Raises:
        Unclear: day and month are ambiguous, or only some cells have a UTC offset.
    """
    dates, notes = _iso_dates(cells)
    if 2 * dates.notna().sum() > cells.notna().sum():
        return dates, notes
    rest = cells.where(dates.isna())
    with_month, with_day = (_dates(rest, dayfirst=each) for each in (False, True))
    if with_month.equals(with_day):
        return dates.fillna(with_month), notes
    example = rest[with_month.notna() | with_day.notna()].iloc[0]
    if day_first is None:
        more = int(with_day.notna().sum()) - int(with_month.notna().sum())
        if not more and not re.match(r"\d+\.\d+\.", example):  # with points the day comes first
            raise Unclear(
                f"Dates such as {example} may have the day or the month first, and no other tells which. "
                "Write workload.data.day_first=true or workload.data.day_first=false."
            )
        day_first = more >= 0
    note = f"dates such as {example} read with the {'day' if day_first else 'month'} first"
    return dates.fillna(with_day if day_first else with_month), (*notes, note)


def _iso_dates(cells: pd.Series) -> tuple[pd.Series, tuple[str, ...]]:
    """Returns ISO dates as local times, or in UTC if the cells have several offsets."""
    try:
        return _dates(cells, format="ISO8601"), ()
    except ValueError:  # several offsets, or missing ones
        dates = _dates(cells, format="ISO8601", utc=True)
        timed = cells[dates.notna()]
        has_offset = timed.str.fullmatch(_WITH_OFFSET)
        if not has_offset.all():
            raise Unclear(
                f"Some dates have a UTC offset ({timed[has_offset].iloc[0]}), and others none "
                f"({timed[~has_offset].iloc[0]}). Write all of them in one way."
            ) from None
        return dates, ("dates have several UTC offsets; all are taken as UTC",)


def _dates(cells: pd.Series, **how: object) -> pd.Series:
    """Returns the dates without time zone; all NaT if pandas is unsure of the format."""
    # pandas takes the format from the first cell, and "May" is a name and its own abbreviation.
    is_may = cells.str.contains(r"\bmay\b", case=False, na=True)
    ordered = cells[is_may.sort_values(kind="stable").index]
    with warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always", UserWarning)
        dates = pd.to_datetime(ordered, errors="coerce", **how).dt.tz_localize(None).astype("datetime64[us]")
    dates = dates.reindex(cells.index)
    if doubts:  # pandas found no format, or another order of day and month
        return pd.Series(pd.NaT, cells.index, dtype="datetime64[us]")
    return dates.where(dates.dt.year >= FIRST_YEAR)


def looks_like_dates(cells: pd.Series, numbers_too: bool = False) -> bool:
    """Returns whether most of the first cells are dates. Years alone count only with ``numbers_too``."""
    sample = cells.dropna().iloc[:SAMPLE]
    if not numbers_too and any(cell.isdigit() and len(cell) != 8 for cell in sample):
        return False
    try:
        dates, _ = parse_dates(sample)
    except Unclear:
        return True
    return 2 * int(dates.notna().sum()) > len(sample)


def looks_like_numbers(cells: pd.Series) -> bool:
    """Returns whether most of the first cells are numbers with either decimal mark; an empty column counts."""
    sample = _without_spaces(cells.dropna().iloc[:SAMPLE])
    is_number = np.logical_or.reduce([_fits(sample, mark) for mark in _NUMBERS])
    return bool(2 * is_number.sum() >= len(sample))


def parse_numbers(cells: pd.DataFrame, decimal: str | None = None) -> pd.DataFrame:
    """Returns the number of each cell, NaN without one.

    Args:
        decimal: ``.`` or ``,``, the decimal mark; the other one groups thousands. None = inferred from the cells.

    Raises:
        Unclear: the cells fit both marks.
    """
    cells = cells.apply(_without_spaces)
    has_comma = cells.apply(lambda column: column.str.contains(",", regex=False, na=False)).to_numpy()
    if decimal is None and has_comma.any():
        decimal = _decimal(cells.to_numpy()[has_comma])
    if decimal is not None:
        away = "," if decimal == "." else "."
        cells = cells.apply(lambda column: column.where(_fits(column, decimal)).str.replace(away, "", regex=False))
        cells = cells.apply(lambda column: column.str.replace(decimal, ".", regex=False))
    numbers = cells.apply(lambda column: pd.to_numeric(column, errors="coerce").astype(np.float64))
    return numbers.where(numbers.abs() <= LARGEST)


def _decimal(cells: Iterable[str]) -> str:
    """Returns the decimal mark that fits more of these cells, which have commas."""
    sample = pd.Series(list(cells), dtype=str)
    points, commas = (int(_fits(sample, mark).sum()) for mark in _NUMBERS)
    if points == commas:
        raise Unclear(
            f"Values such as {sample[0]} may have the comma before tenths or between thousands, and no other tells "
            "which. Write workload.data.decimal=',' or workload.data.decimal='.'."
        )
    return "." if points > commas else ","


def _fits(cells: pd.Series, mark: str) -> pd.Series:
    return cells.str.fullmatch(_NUMBERS[mark], na=False)


def _without_spaces(cells: pd.Series) -> pd.Series:
    return cells.astype(str).where(cells.notna()).str.replace(_SPACES, "", regex=True)
