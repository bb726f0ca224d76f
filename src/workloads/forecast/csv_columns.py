"""Finds out which column of a table holds dates, which values, and which tells series apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wellfed import DataError
from workloads.forecast.cells import coded, different, looks_like_dates, looks_like_numbers
from workloads.forecast.steps import Dates
from workloads.forecast.text_table import TextTable

DATE_NAMES = ("date", "ds", "datetime", "timestamp", "time", "period", "day", "week", "month", "quarter", "year")
SERIES_NAMES = ("unique_id", "series_id", "series", "item_id", "id")
LEAST_REPEATS = 0.2
"""Share of rows whose date another row has too, from which a column that tells them apart names series."""


@dataclass(frozen=True)
class Columns:
    """Which column is what, by its place."""

    date: int
    values: tuple[int, ...]
    series: int | None
    left_out: tuple[str, ...] = ()
    """Names of columns that hold no numbers."""


def find_dates(table: TextTable, wanted: str | None) -> int:
    """Place of the column of dates: the one wanted, else one with a usual name, else the first that holds dates.

    Raises:
        DataError: there is none.
    """
    if wanted is not None:
        return table.place(wanted, "date_column")
    low = [name.casefold() for name in table.names]
    named = [low.index(name) for name in DATE_NAMES if name in low]
    for place in named:
        if looks_like_dates(table.columns[place], numbers_too=True):
            return place
    for place, column in enumerate(table.columns):
        if looks_like_dates(column):
            return place
    if named:  # its cells will be refused with their lines
        return named[0]
    raise DataError(
        f"{table.file}: no column holds dates; there are {listed(table.names)}. Write workload.data.date_column=NAME; "
        "dates such as 2024-05-31 are read."
    )


def find_columns(
    table: TextTable, date: int, date_R: Dates, target: str | Sequence[str] | None, series_column: str | None
) -> Columns:
    """Which columns are of use, by the knobs or by what they hold.

    Raises:
        DataError: a column that is named is not there, or those that are not named can't be told.
    """
    series = None if series_column is None else table.place(series_column, "series_column")
    numeric = [looks_like_numbers(column) for column in table.columns]
    if series_column is None:
        series = _series_place(table, date, date_R, numeric)
    wanted = [target] if isinstance(target, str) else target
    if wanted is not None:
        values = list(dict.fromkeys(table.place(name, "target") for name in wanted))
    else:
        others = [place for place in range(len(table.names)) if place not in (date, series)]
        values = [place for place in others if numeric[place]]
        if len(values) > 1:  # an unnamed one counts the rows
            values = [place for place in values if not table.is_unnamed(place)]
    rest = [place for place in range(len(table.names)) if place not in (date, series, *values)]
    left_out = tuple(table.names[place] for place in rest)
    if not values or (series is not None and len(values) > 1):
        found = "no column of numbers" if not values else f"several columns of numbers ({listed(table.names, values)})"
        raise DataError(
            f"{table.file}: {found} beside the dates ({table.names[date]!r})"
            f"{'' if series is None else f' and the names of series ({table.names[series]!r})'}. "
            "Write workload.data.target=NAME for the one with the values."
        )
    if clash := [place for place in values if place in (date, series)]:
        raise DataError(
            f"{table.file}: column {listed(table.names, clash)} can't be target and dates or names of series at once. "
            "Write another workload.data.target."
        )
    return Columns(date, tuple(values), series, left_out)


def _series_place(table: TextTable, date: int, date_R: Dates, numeric: list[bool]) -> int | None:
    """The column that tells rows of one date apart, if dates repeat and one column alone does."""
    known_R = ~np.isnat(date_R)
    if len(different(date_R[known_R])) > (1 - LEAST_REPEATS) * known_R.sum():
        return None
    others = [place for place in range(len(table.names)) if place != date]
    named = [place for place in others if table.names[place].casefold() in SERIES_NAMES]
    candidates = named or [place for place in others if not numeric[place]]
    if len(candidates) != 1:
        return None
    code_R, names = coded(table.columns[candidates[0]])
    pair_R = (date_R.astype(np.int64) * len(names) + code_R)[known_R]
    return candidates[0] if len(different(pair_R)) > (1 - LEAST_REPEATS) * len(pair_R) else None


def describe(table: TextTable, columns: Columns) -> str:
    """One sentence for people."""
    values = f"values of {listed(table.names, columns.values)}"
    series = "" if columns.series is None else f", a series for each {table.names[columns.series]!r}"
    left_out = f"; left out {listed(columns.left_out)}" if columns.left_out else ""
    return f"{table.file.name}: dates of {table.names[columns.date]!r}, {values}{series}{left_out}"


def listed(names: Sequence[str], places: Iterable[int] | None = None, most: int = 8) -> str:
    """The first of some names, in quotes."""
    chosen = list(names) if places is None else [names[place] for place in places]
    more = f" and {len(chosen) - most} more" if len(chosen) > most else ""
    return ", ".join(map(repr, chosen[:most])) + more
