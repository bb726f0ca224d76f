"""Reads series from a CSV file: a row per date, with a column per series (wide) or a series per row (long)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from wellfed import DataError
from wellfed.units import counted, show_count, show_line
from workloads.forecast.cells import Unclear, looks_like_dates, looks_like_numbers, parse_dates, parse_numbers
from workloads.forecast.series import Floats, SeriesSet, trimmed
from workloads.forecast.steps import (
    HOUR,
    Dates,
    Frequency,
    UnevenDates,
    clock_set_back,
    infer_frequency,
    parse_frequency,
    show_date,
)
from workloads.forecast.text_table import TextTable, read_text_table

DATE_NAMES = ("date", "ds", "datetime", "timestamp", "time", "period", "day", "week", "month", "quarter", "year")
SERIES_NAMES = ("unique_id", "series_id", "series", "item_id", "id")
LEAST_REPEATS = 0.2
"""Minimum share of rows with a repeated date for a column to name the series."""
MOST_MISSING = 0.95
"""Share of missing steps above which the frequency is wrong, e.g. because of one wrong date."""
SMALL = 1000
"""Number of steps up to which any share may be missing."""


class Columns(NamedTuple):
    """Names of the used columns; ``series`` is None in the wide layout."""

    date: str
    values: list[str]
    series: str | None


def read_csv(
    path: Path,
    *,
    date_column: str | None = None,
    target: str | Sequence[str] | None = None,
    series_column: str | None = None,
    frequency: str | None = None,
    max_bad_rows: int = 100,
    decimal: str | None = None,
    day_first: bool | None = None,
) -> SeriesSet:
    """Reads the series of a file; `workloads.forecast.data.datasets` describes the arguments.

    Raises:
        DataError: names file, line and way out.
    """
    table = read_text_table(path, max_bad_rows)
    try:
        date_name = _date_column(table, date_column)
        dates, notes = parse_dates(table.cells[date_name], day_first)
        _note_bad_dates(table, date_name, dates)
        columns = _find_columns(table, date_name, dates, target, series_column)
        entries, names = _entries(table, columns, dates, parse_numbers(table.cells[columns.values], decimal))
    except Unclear as error:
        raise DataError(f"{table.file}: {error}") from error
    found = _frequency(table, dates, frequency)
    steps, more = _one_value_a_step(table, entries, found)
    values, starts = _laid_out(table, entries, steps, names, found)
    notes = (_describe(table, columns), *table.notes, *notes, *more, *table.bad.notes())
    return trimmed(names, values, found, starts, notes, str(table.file))


def _date_column(table: TextTable, wanted: str | None) -> str:
    """Returns the column wanted, else one with a usual name, else the first that holds dates."""
    if wanted is not None:
        return table.find(wanted, "date_column")
    low: dict[str, str] = {name.casefold(): name for name in table.cells}
    named = [low[name] for name in DATE_NAMES if name in low]
    for name in named:
        if looks_like_dates(table.cells[name], numbers_too=True):
            return name
    for name in table.cells:
        if looks_like_dates(table.cells[name]):
            return str(name)
    if named:  # errors will show its lines
        return named[0]
    raise DataError(
        f"{table.file}: no column holds dates; there are {_listed(table.cells)}. Write workload.data.date_column=NAME; "
        "dates such as 2024-05-31 are read."
    )


def _note_bad_dates(table: TextTable, name: str, dates: pd.Series) -> None:
    cells = table.cells[name]
    bad = cells[dates.isna()]
    if 2 * len(bad) > len(cells):
        raise DataError(
            f"{table.file}: {len(bad)} of {counted(len(cells), 'cell')} of column {name!r} are no dates, such as "
            f"{show_line('' if pd.isna(bad.iloc[0]) else bad.iloc[0])!r} in line {bad.index[0]}. "
            "Write workload.data.date_column=NAME for another column, or dates such as 2024-05-31."
        )
    for line, cell in bad.items():
        table.bad.add(line, "no date" if pd.isna(cell) else f"{show_line(cell)!r} in column {name!r} is no date")


def _find_columns(
    table: TextTable, date: str, dates: pd.Series, target: str | Sequence[str] | None, series_column: str | None
) -> Columns:
    """Returns the columns that the knobs name, else those that the cells suggest.

    Raises:
        DataError: a named column is missing, or the columns of values are ambiguous.
    """
    numeric = [name for name in table.cells if looks_like_numbers(table.cells[name])]
    series = _series_column(table, date, dates, numeric)
    if series_column is not None:
        series = table.find(series_column, "series_column")
    wanted = [target] if isinstance(target, str) else target
    if wanted is not None:
        values = list(dict.fromkeys(table.find(name, "target") for name in wanted))
    else:
        values = [name for name in numeric if name not in (date, series)]
        if len(values) > 1:  # an unnamed column counts the rows
            values = [name for name in values if not table.is_unnamed(name)]
    if not values or (series is not None and len(values) > 1):
        found = "no column of numbers" if not values else f"several columns of numbers ({_listed(values)})"
        raise DataError(
            f"{table.file}: {found} beside the dates ({date!r})"
            f"{'' if series is None else f' and the names of series ({series!r})'}. "
            "Write workload.data.target=NAME for the one with the values."
        )
    if clash := [name for name in values if name in (date, series)]:
        raise DataError(
            f"{table.file}: column {_listed(clash)} can't be target and dates or names of series at once. "
            "Write another workload.data.target."
        )
    return Columns(date, values, series)


def _series_column(table: TextTable, date: str, dates: pd.Series, numeric: list[str]) -> str | None:
    """Returns the column that distinguishes rows of one date, if dates repeat and exactly one column does."""
    known = dates.notna()
    enough = (1 - LEAST_REPEATS) * known.sum()
    if dates.nunique() > enough:
        return None
    others = [name for name in table.cells if name != date]
    named = [name for name in others if name.casefold() in SERIES_NAMES]
    candidates = named or [name for name in others if name not in numeric]
    if len(candidates) != 1:
        return None
    pairs = pd.DataFrame({"date": dates, "series": table.cells[candidates[0]]})[known]
    return candidates[0] if (~pairs.duplicated()).sum() > enough else None


def _entries(
    table: TextTable, columns: Columns, dates: pd.Series, numbers: pd.DataFrame
) -> tuple[pd.DataFrame, list[str]]:
    """Returns ``line``, ``series``, ``date`` and ``value`` of each value in file order, and all series.

    A bad row has a cell with text instead of a number, or no name of a series.
    """
    cells, known = table.cells, dates.notna()
    if columns.series is not None:
        for line in cells.index[cells[columns.series].isna() & known]:
            table.bad.add(line, f"no name of a series in column {columns.series!r}")
        known &= cells[columns.series].notna()
    for name in columns.values:
        for line, cell in cells[name][numbers[name].isna() & cells[name].notna() & known].items():
            table.bad.add(line, f"{show_line(cell)!r} in column {name!r} is no number")
    table.bad.check(len(cells))
    names = columns.values if columns.series is None else sorted(cells[columns.series][known].unique())
    found = {
        name: pd.DataFrame({"line": cells.index, "date": dates, "value": numbers[name]})[known]
        for name in columns.values
    }
    entries = pd.concat(found, names=["series"]).reset_index("series")
    if columns.series is not None:
        entries["series"] = cells[columns.series][known]
    entries = entries.dropna(subset="value").reset_index(drop=True)
    if entries.empty:
        raise DataError(
            f"{table.file}: no value in {_listed(columns.values)}. Write workload.data.target=NAME for another column."
        )
    return entries, list(names)


def _frequency(table: TextTable, dates: pd.Series, wanted: str | None) -> Frequency:
    date_U: Dates = np.sort(dates.dropna().unique()).astype("M8[us]")
    if wanted is not None:
        return parse_frequency(wanted, date_U[0])
    try:
        return infer_frequency(date_U)
    except UnevenDates as error:
        line = dates.index[dates == error.date][0]
        raise DataError(f"{table.file}, line {line}: {error}") from error


def _one_value_a_step(table: TextTable, entries: pd.DataFrame, frequency: Frequency) -> tuple[pd.DataFrame, list[str]]:
    """Returns ``series``, ``step`` and ``value``, and notes on sorted, skipped or averaged rows.

    Raises:
        DataError: a series has two values for one step without a clock change.
    """
    entries["step"] = frequency.numbers(entries["date"].to_numpy().astype("M8[us]"))
    earlier = entries["line"][entries["date"] < entries.groupby("series")["date"].shift()]
    is_copy = entries.duplicated(["series", "date", "value"])
    kept = entries[~is_copy]
    doubled = kept[kept.duplicated(["series", "step"], keep=False)].sort_values(["series", "step", "line"])
    notes = []
    set_back = _second_of_clock_changes(table, doubled, frequency)
    if moved := earlier[~earlier.index.isin(set_back.index)].nunique():
        notes.append(f"{counted(moved, 'row')} earlier than the row before; sorted by date")
    if is_copy.any():
        notes.append(f"{counted(int(is_copy.sum()), 'value')} given twice, the same each time; the second left out")
    if len(set_back):
        first = set_back.iloc[0]
        notes.append(
            f"{counted(len(set_back), 'value')} of an hour that a clock change gives twice, averaged with the first; "
            f"the first: {first['series']}, {show_date(np.datetime64(first['date']))}"
        )
    return kept.groupby(["series", "step"])["value"].mean().reset_index(), notes


def _second_of_clock_changes(table: TextTable, doubled: pd.DataFrame, frequency: Frequency) -> pd.DataFrame:
    """Returns the second entry of each pair that a clock set back has repeated; refuses all other pairs."""
    again = doubled.duplicated(["series", "step"])
    is_pair = doubled.groupby(["series", "step"])["date"].transform("size") == 2
    is_pair &= doubled["date"] == doubled.groupby(["series", "step"])["date"].transform("first")
    is_pair &= frequency.kind == "time" and frequency.every <= HOUR
    found = doubled[again & is_pair]
    is_set_back = [clock_set_back(dates.to_numpy().astype("M8[us]")) for _, dates in found.groupby("series")["date"]]
    set_back = found[np.concatenate([np.zeros(0, bool), *is_set_back])]
    wrong = doubled[again & ~doubled.index.isin(set_back.index)].sort_index()
    if len(wrong):
        same = doubled[(doubled["series"] == wrong.iloc[0]["series"]) & (doubled["step"] == wrong.iloc[0]["step"])]
        _refuse_double(table, frequency, same.iloc[0], same.iloc[1])
    return set_back


def _refuse_double(table: TextTable, frequency: Frequency, first: pd.Series, second: pd.Series) -> None:
    dates = [show_date(np.datetime64(each["date"])) for each in (first, second)]
    what = (
        f"{dates[0]} twice"
        if dates[0] == dates[1]
        else f"{dates[0]} and {dates[1]}, which are one step of {frequency.name}"
    )
    raise DataError(
        f"{table.file}, line {second['line']}: {first['series']!r} has {what}: {first['value']:g} "
        f"(line {first['line']}) and {second['value']:g}. Remove one. If the file holds several series "
        "one below the other, write workload.data.series_column=NAME of the one column that tells them apart (join two "
        "where it takes two). If a clock was set back, write dates with their UTC offset."
    )


def _laid_out(
    table: TextTable, entries: pd.DataFrame, steps: pd.DataFrame, names: Sequence[str], frequency: Frequency
) -> tuple[list[Floats], list[int]]:
    """Returns the values of each series by step, NaN if missing, and its first step."""
    by_series = {name: (rows["step"].to_numpy(), rows["value"].to_numpy()) for name, rows in steps.groupby("series")}
    nothing = np.zeros(0, np.int64), np.zeros(0)
    found = [by_series.get(name, nothing) for name in names]
    starts = [int(step_N[0]) if len(step_N) else 0 for step_N, _ in found]
    spans = [int(step_N[-1] - step_N[0]) + 1 if len(step_N) else 0 for step_N, _ in found]
    _refuse_sparse(table, entries, frequency, sum(spans))
    series = [np.full(span, np.nan) for span in spans]
    for value_T, start, (step_N, value_N) in zip(series, starts, found, strict=True):
        value_T[step_N - start] = value_N
    return series, starts


def _refuse_sparse(table: TextTable, entries: pd.DataFrame, frequency: Frequency, num_steps: int) -> None:
    if len(entries) >= (1 - MOST_MISSING) * num_steps or num_steps < SMALL:
        return
    ends = [entries.loc[place] for place in (entries["date"].idxmin(), entries["date"].idxmax())]
    first, last = (f"{show_date(np.datetime64(each['date']))} (line {each['line']})" for each in ends)
    raise DataError(
        f"{table.file}: from {first} to {last} there are {show_count(num_steps)} steps of {frequency.name} and "
        f"{show_count(len(entries))} values. Correct the date that is wrong, or write a longer "
        "workload.data.frequency: D, W, M ..."
    )


def _describe(table: TextTable, columns: Columns) -> str:
    series = "" if columns.series is None else f", a series for each {columns.series!r}"
    rest = [name for name in table.cells if name not in (columns.date, columns.series, *columns.values)]
    left_out = f"; left out {_listed(rest)}" if rest else ""
    return f"{table.file.name}: dates of {columns.date!r}, values of {_listed(columns.values)}{series}{left_out}"


def _listed(names: Iterable[str], most: int = 8) -> str:
    chosen = list(names)
    more = f" and {len(chosen) - most} more" if len(chosen) > most else ""
    return ", ".join(map(repr, chosen[:most])) + more
