"""Reads a table of interactions: a row for each item that a user chose or rated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from wellfed import DataError, first_line
from wellfed.units import counted, show_count, show_line
from workloads.recsys.bad_lines import decode, read_file
from workloads.recsys.interactions import Interactions, Ints

NAMES = {
    "user": ("user", "userid", "uid", "customer", "customerid", "member", "memberid", "reviewer", "reviewerid"),
    "item": ("item", "itemid", "iid", "movie", "movieid", "product", "productid", "article", "articleid", "asin"),
    "rating": ("rating", "ratings", "score", "stars", "value", "count"),
    "time": ("timestamp", "time", "date", "datetime"),
}
"""Names of columns, in lower case, letters only."""
WAY_OUT = "Name the columns user and item in the first line, and rating and time where there are any."


def read_table(file: Path, max_bad_lines: int, seed: int) -> Interactions:
    """Returns the interactions of a CSV or TSV file; users and items have no sentences.

    Rows of one user with equal times are shuffled, since their order in the file may reveal the last one.

    Args:
        seed: seed of the shuffle.

    Raises:
        DataError: names file, line and way out.
    """
    text = decode(read_file(file))
    separator = _separator(text)
    first = next(line for line in text.splitlines() if line.strip()).split(separator)
    names, has_header = _names(file, [field.strip().strip('"') for field in first])
    try:
        table = pd.read_csv(
            StringIO(text),
            sep=separator,
            header=0 if has_header else None,
            dtype=str,
            skipinitialspace=True,
            index_col=False,
        )
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise DataError(f"{file}: {first_line(error)}. Correct that line.") from error
    columns = {kind: table.iloc[:, place] for kind, place in names.items()}
    rating_N = pd.to_numeric(columns["rating"], errors="coerce") if "rating" in columns else None
    time_N = _times(columns["time"]) if "time" in columns else None
    wrong = {"no user": columns["user"].isna(), "no item": columns["item"].isna()}
    if rating_N is not None:
        wrong["the rating is no number"] = ~np.isfinite(rating_N)
    if time_N is not None:
        wrong["the time is neither a number nor a date"] = time_N.isna()
    good_N, notes = _good_rows(file, table, wrong, max_bad_lines, has_header)
    user_N, user_names = pd.factorize(columns["user"][good_N], sort=True)
    item_N, item_names = pd.factorize(columns["item"][good_N], sort=True)
    mixed_N = np.random.default_rng(seed).permutation(len(user_N))
    times: Ints = np.zeros(len(user_N), np.int64) if time_N is None else pd.factorize(time_N[good_N], sort=True)[0]
    if time_N is None:
        notes = (*notes, "no column of times: a random item of each user is the last one, by workload.data.seed")
    found = Interactions(
        users=user_N[mixed_N],
        items=item_N[mixed_N],
        ratings=None if rating_N is None else rating_N[good_N].to_numpy(np.float64)[mixed_N],
        times=times[mixed_N],
        user_texts=[""] * len(user_names),
        item_texts=[""] * len(item_names),
        notes=(f"{file.name}: {_described(table, names, has_header)}", *notes),
    )
    if len(item_names) < 2:
        raise DataError(
            f"{file}: {counted(len(item_names), 'item')}, so there is nothing to rank. Point workload.data.path at a "
            "table with several."
        )
    return found


def _separator(text: str) -> str:
    first = next(line for line in text.splitlines() if line.strip())
    return max("\t,;|", key=lambda each: (first.count(each), each == ","))


def _names(file: Path, first: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Returns the position of each kind of column, and whether the first line is a header."""
    bare = [re.sub("[^a-z]", "", name.lower().partition(":")[0]) for name in first]
    found = {kind: place for kind, known in NAMES.items() for place in [_first_of(bare, known)] if place is not None}
    if "user" in found and "item" in found:
        return found, True
    if 2 <= len(first) <= 4 and any(re.fullmatch(r"[-+]?\d+(\.\d*)?", field) for field in first):
        return {kind: place for place, kind in enumerate(NAMES) if place < len(first)}, False
    shown = ", ".join(repr(show_line(name)) for name in first[:8])
    raise DataError(f"{file}, line 1: {shown} are no columns of users and items. {WAY_OUT}")


def _first_of(bare: Sequence[str], known: Sequence[str]) -> int | None:
    return next((bare.index(name) for name in known if name in bare), None)


def _times(cells: pd.Series) -> pd.Series:
    """Returns numbers, or microseconds of dates; NaN for other cells."""
    numbers = pd.to_numeric(cells, errors="coerce")
    if 2 * numbers.notna().sum() >= len(cells):
        return numbers
    dates = pd.to_datetime(cells, errors="coerce", utc=True, format="ISO8601")
    return dates.astype("int64").where(dates.notna()).astype("float64")


def _good_rows(
    file: Path, table: pd.DataFrame, wrong: dict[str, pd.Series], most: int, has_header: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the usable rows, and a note on the others."""
    bad_N = np.logical_or.reduce([each.to_numpy() for each in wrong.values()])
    if not len(table) or bad_N.all():
        raise DataError(f"{file} holds no row that can be used. {WAY_OUT}")
    if not bad_N.any():
        return ~bad_N, ()
    row = int(bad_N.argmax())
    reason = next(text for text, each in wrong.items() if each.iloc[row])
    cells = ", ".join("" if pd.isna(cell) else str(cell) for cell in table.iloc[row])
    shown = f"row {row + 1}{' after the names' if has_header else ''}: {reason}: {show_line(cells)!r}"
    if bad_N.sum() > most:
        raise DataError(
            f"{file}: {counted(int(bad_N.sum()), 'bad row')}, more than workload.data.max_bad_lines={most}; the first "
            f"is {shown}. Correct the file, or raise the limit."
        )
    return ~bad_N, (f"{counted(int(bad_N.sum()), 'bad row')} skipped, the first: {shown}",)


def _described(table: pd.DataFrame, names: dict[str, int], has_header: bool) -> str:
    place = {kind: repr(str(table.columns[at])) if has_header else f"column {at + 1}" for kind, at in names.items()}
    kinds = {"user": "users", "item": "items", "rating": "ratings", "time": "times"}
    return f"{show_count(len(table))} rows, " + ", ".join(f"{kinds[kind]} of {at}" for kind, at in place.items())
