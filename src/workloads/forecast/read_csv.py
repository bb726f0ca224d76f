"""Reads series of a CSV file: a row for each date, with one column a series (wide) or one series a row (long).

Shapes: R rows of the file, E entries (a value of one series at one date), S series.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from wellfed import DataError
from wellfed.units import counted, show_count, show_line
from workloads.forecast.cells import Bools, Unclear, coded, different, is_missing, parse_dates, parse_numbers
from workloads.forecast.csv_columns import Columns, describe, find_columns, find_dates, listed
from workloads.forecast.series import Floats, SeriesSet, trimmed
from workloads.forecast.steps import (
    HOUR,
    Dates,
    Frequency,
    Ints,
    UnevenDates,
    clock_set_back,
    infer_frequency,
    parse_frequency,
    show_date,
)
from workloads.forecast.text_table import TextTable, read_text_table

MOST_MISSING = 0.95
"""Share of missing steps above which a frequency can't be meant: one wrong date in a file, or time stamps of events."""
SMALL = 1000
"""Steps up to which that does not matter."""


@dataclass(frozen=True)
class Entries:
    """All values that are there, in the order of the file."""

    names: list[str]
    codes: Ints
    """Which of ``names`` each one is of, [E], as all that follow."""
    dates: Dates
    values: Floats
    lines: Ints


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
    """The series of a file.

    Args:
        date_column: None = one called date, or the first whose cells are dates.
        target: the column of values in the long layout; those to take in the wide one. None = all columns of numbers.
        series_column: names the series of each row, and makes it the long layout. None = the wide one, unless dates
            repeat and one column alone is of text.
        frequency: D, h, 15min, B, W, M and so on: dates are rounded down to it. None = what all dates lie on.

    Raises:
        DataError: naming file, line and way out.
    """
    table = read_text_table(path, max_bad_rows)
    try:
        date_place = find_dates(table, date_column)
        date_R, notes = parse_dates(table.columns[date_place], day_first)
        _note_bad_dates(table, date_place, date_R)
        columns = find_columns(table, date_place, date_R, target, series_column)
        entries = _entries(table, columns, date_R, parse_numbers([table.columns[p] for p in columns.values], decimal))
    except Unclear as error:
        raise DataError(f"{table.file}: {error}") from error
    found = _frequency(table, date_R, frequency)
    values, starts, more = _laid_out(table, entries, found)
    return trimmed(
        entries.names,
        values,
        found,
        starts,
        (describe(table, columns), *table.notes, *notes, *more, *table.bad.notes()),
        str(table.file),
    )


def _note_bad_dates(table: TextTable, place: int, date_R: Dates) -> None:
    column, bad = table.columns[place], np.flatnonzero(np.isnat(date_R)).tolist()
    if 2 * len(bad) > len(column):
        raise DataError(
            f"{table.file}: {len(bad)} of {counted(len(column), 'cell')} of column {table.names[place]!r} are no "
            f"dates, such as {show_line(column[bad[0]])!r} in line {table.lines[bad[0]]}. "
            "Write workload.data.date_column=NAME for another column, or dates such as 2024-05-31."
        )
    for row in bad:
        reason = f"{show_line(column[row])!r} in column {table.names[place]!r} is no date" if column[row] else "no date"
        table.bad.add(table.lines[row], reason)


def _entries(table: TextTable, columns: Columns, date_R: Dates, values: list[Floats]) -> Entries:
    """What has a date and a value; what has neither a value nor a word for its lack is a bad row."""
    line_R, known_R = np.array(table.lines), ~np.isnat(date_R)
    names, code_R = [table.names[place] for place in columns.values], np.zeros(len(line_R), np.int64)
    if columns.series is not None:
        cells = table.columns[columns.series]
        for row in np.flatnonzero(is_missing(cells) & known_R):
            table.bad.add(table.lines[row], f"no name of a series in column {table.names[columns.series]!r}")
            known_R[row] = False
        code_R[known_R], names = coded([cells[row] for row in np.flatnonzero(known_R)])
    rows = []
    for number, (place, value_R) in enumerate(zip(columns.values, values, strict=True)):
        cells = table.columns[place]
        missing_R = is_missing(cells)
        for row in np.flatnonzero(np.isnan(value_R) & ~missing_R & known_R):
            table.bad.add(table.lines[row], f"{show_line(cells[row])!r} in column {table.names[place]!r} is no number")
        kept_R = np.flatnonzero(known_R & ~np.isnan(value_R))
        rows.append((code_R[kept_R] + number, date_R[kept_R], value_R[kept_R], line_R[kept_R]))
    code_E, date_E, value_E, line_E = (np.concatenate(each) for each in zip(*rows, strict=True))
    table.bad.check(len(table.lines))
    if not len(value_E):
        raise DataError(
            f"{table.file}: no value in {listed(table.names, columns.values)}. Write workload.data.target=NAME for "
            "another column."
        )
    return Entries(names, code_E, date_E, value_E, line_E)


def _frequency(table: TextTable, date_R: Dates, wanted: str | None) -> Frequency:
    date_U = np.sort(different(date_R[~np.isnat(date_R)]))
    if wanted is not None:
        return parse_frequency(wanted, date_U[0])
    try:
        return infer_frequency(date_U)
    except UnevenDates as error:
        line = table.lines[int(np.flatnonzero(date_R == error.date)[0])]
        raise DataError(f"{table.file}, line {line}: {error}") from error


def _laid_out(table: TextTable, entries: Entries, frequency: Frequency) -> tuple[list[Floats], list[int], list[str]]:
    """The values of each series step by step, NaN where one is missing, its first step, and what is to be said."""
    step_E = frequency.numbers(entries.dates)
    order_E = _without_copies(entries, np.lexsort((entries.values, entries.dates, step_E, entries.codes)))
    code_E, step_E, value_E = entries.codes[order_E], step_E[order_E], entries.values[order_E]
    is_again_E = np.concatenate([[False], (np.diff(code_E) == 0) & (np.diff(step_E) == 0)])
    second = np.flatnonzero(is_again_E)
    if len(wrong := second[~_is_set_back(entries, frequency, order_E, second)]):
        _refuse_double(table, entries, frequency, order_E[wrong[0] - 1 : wrong[0] + 1])
    value_E[second - 1] += (value_E[second] - value_E[second - 1]) / 2
    notes = _notes(entries, len(entries.dates) - len(order_E), np.maximum(order_E[second], order_E[second - 1]))
    code_E, step_E, value_E = code_E[~is_again_E], step_E[~is_again_E], value_E[~is_again_E]
    edges = np.searchsorted(code_E, np.arange(len(entries.names) + 1))
    steps = [step_E[begin:end] for begin, end in pairwise(edges)]
    starts = [int(each[0]) if len(each) else 0 for each in steps]
    spans = [int(each[-1] - each[0]) + 1 if len(each) else 0 for each in steps]
    _refuse_sparse(table, entries, frequency, sum(spans))
    series = [np.full(span, np.nan) for span in spans]
    for value_T, start, step, (begin, end) in zip(series, starts, steps, pairwise(edges), strict=True):
        value_T[step - start] = value_E[begin:end]
    return series, starts, notes


def _without_copies(entries: Entries, order_E: Ints) -> Ints:
    """The order without values that repeat another of the same series and date."""
    columns = entries.codes[order_E], entries.dates[order_E].astype(np.int64), entries.values[order_E]
    is_copy_E = np.logical_and.reduce([np.diff(each) == 0 for each in columns])
    return np.delete(order_E, 1 + np.flatnonzero(is_copy_E))


def _is_set_back(entries: Entries, frequency: Frequency, order_E: Ints, second: Ints) -> Bools:
    """Whether each second value of a step is there because a clock was set back."""
    found = np.zeros(len(second), bool)
    if frequency.kind != "time" or frequency.every > HOUR:
        return found
    is_pair = entries.dates[order_E[second]] == entries.dates[order_E[second - 1]]
    is_pair &= ~np.isin(second - 1, second) & ~np.isin(second + 1, second)
    code = np.where(is_pair, entries.codes[order_E[second]], -1)
    for each in different(code[is_pair]):
        found[code == each] = clock_set_back(entries.dates[order_E[second[code == each]]])
    return found


def _notes(entries: Entries, num_copies: int, set_back: Ints) -> list[str]:
    """What was put in order, left out and averaged; ``set_back`` are places of entries."""
    order_E = np.argsort(entries.codes, kind="stable")
    is_back_E = (np.diff(entries.dates[order_E]).astype(np.int64) < 0) & (np.diff(entries.codes[order_E]) == 0)
    earlier = np.unique(entries.lines[np.setdiff1d(order_E[1:][is_back_E], set_back)])
    notes = [f"{counted(len(earlier), 'row')} earlier than the row before; sorted by date"] if len(earlier) else []
    if num_copies:
        notes.append(f"{counted(num_copies, 'value')} given twice, the same each time; the second left out")
    if len(set_back):
        first = int(set_back[0])
        notes.append(
            f"{counted(len(set_back), 'value')} of an hour that a clock change gives twice, averaged with the first; "
            f"the first: {entries.names[int(entries.codes[first])]}, {show_date(entries.dates[first])}"
        )
    return notes


def _refuse_double(table: TextTable, entries: Entries, frequency: Frequency, pair_2: Ints) -> None:
    pair_2 = pair_2[np.argsort(entries.lines[pair_2], kind="stable")]
    first, second = pair_2
    dates = [show_date(date) for date in entries.dates[pair_2]]
    name = entries.names[int(entries.codes[first])]
    what = (
        f"{dates[0]} twice"
        if dates[0] == dates[1]
        else f"{dates[0]} and {dates[1]}, which are one step of {frequency.name}"
    )
    raise DataError(
        f"{table.file}, line {entries.lines[second]}: {name!r} has {what}: {entries.values[first]:g} "
        f"(line {entries.lines[first]}) and {entries.values[second]:g}. Remove one; if the file holds several series "
        "one below the other, write workload.data.series_column=NAME of the one column that tells them apart (join two "
        "where it takes two); if a clock was set back, write dates with their UTC offset."
    )


def _refuse_sparse(table: TextTable, entries: Entries, frequency: Frequency, num_steps: int) -> None:
    num_values = len(entries.values)
    if num_values >= (1 - MOST_MISSING) * num_steps or num_steps < SMALL:
        return
    first, last = int(entries.dates.argmin()), int(entries.dates.argmax())
    raise DataError(
        f"{table.file}: from {show_date(entries.dates[first])} (line {entries.lines[first]}) to "
        f"{show_date(entries.dates[last])} (line {entries.lines[last]}) there are {show_count(num_steps)} steps of "
        f"{frequency.name} and {show_count(num_values)} values. Correct the date that is wrong, or write a longer "
        "workload.data.frequency: D, W, M ..."
    )
