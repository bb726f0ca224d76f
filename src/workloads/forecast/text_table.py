"""Reads a CSV file with pandas into a table of text that keeps line numbers."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from wellfed import DataError, check_file, first_line
from wellfed.units import counted, show_line

SEPARATORS = (";", "\t", "|", ",")
"""Possible separators of cells. The first wins a tie, since decimal commas are common."""
SAMPLE_LINES = 50
"""Number of lines in which separators are counted."""
MISSING = ("", "-", "--", ".", "?", "na", "n/a", "nan", "nat", "none", "null", "#n/a", "<na>")
"""Lower-case texts of missing values."""
_PREAMBLE = re.compile(r"(?:[^\S\n]*(?:#.*|sep=.\s*?)?\n)*")
"""Blank lines, comments, and the line ``sep=;`` that Excel writes."""
_DATE = re.compile(r"\s*(\d{4}[-/.]\d{1,2}([-/.]\d{1,2})?|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})\b.*")


class BadRows:
    """A counter of bad lines that keeps the first, and raises an error beyond ``limit``."""

    def __init__(self, file: Path, limit: int) -> None:
        self._file, self._limit = file, limit
        self._lines: set[int] = set()
        self._one = ""

    def add(self, line: int, reason: str) -> None:
        """Records the fault of a line (counted from 1).

        Raises:
            DataError: more than ``limit`` lines have a fault.
        """
        self._lines.add(line)
        self._one = self._one or f"line {line}: {reason}"
        if len(self._lines) > self._limit:
            raise DataError(
                f"{self._file}: more bad rows than workload.data.max_bad_rows={self._limit}, such as {self._one}. "
                "Correct the file, or write workload.data.max_bad_rows=N to skip as many."
            )

    @property
    def num_lines(self) -> int:
        """Lines with a fault."""
        return len(self._lines)

    def check(self, num_rows: int) -> None:
        """Raises an error if half of the rows are bad, since the file then has another layout.

        Raises:
            DataError: at least half of the rows are bad.
        """
        if self._lines and 2 * len(self._lines) >= num_rows:
            raise DataError(
                f"{self._file}: {len(self._lines)} of {counted(num_rows, 'row')} can't be read, such as {self._one}. "
                "Correct the file, or say by workload.data.date_column, target, series_column, decimal how to read it."
            )

    def notes(self) -> tuple[str, ...]:
        """Returns a sentence if there were bad rows."""
        if not self._lines:
            return ()
        return (f"{counted(len(self._lines), 'bad row')} skipped, in whole or in part, such as {self._one}",)


@dataclass(frozen=True)
class TextTable:
    """Cells of a file, stripped of blanks."""

    file: Path
    cells: pd.DataFrame
    """Texts, NaN if missing. The index is the line number, from 1."""
    bad: BadRows
    notes: tuple[str, ...]

    def is_unnamed(self, name: str) -> bool:
        """Returns whether the header has no name for the column."""
        return name == f"column {list(self.cells).index(name) + 1}"

    def find(self, wanted: str, knob: str) -> str:
        """Returns the name of a knob's column, ignoring case.

        Raises:
            DataError: there is no such column.
        """
        names: dict[str, str] = {name.casefold(): name for name in reversed(list(self.cells))}
        names |= {name: name for name in self.cells}
        found = names.get(wanted.strip()) or names.get(wanted.strip().casefold())
        if found is None:
            raise DataError(
                f"{self.file} has no column {wanted!r}. Write workload.data.{knob}=NAME with one of "
                f"{', '.join(map(repr, self.cells))}."
            )
        return found


def read_text_table(path: Path, max_bad_rows: int) -> TextTable:
    """Reads a file with a header line and cells separated by comma, semicolon, tab or ``|``.

    Raises:
        DataError: the file is unreadable, has no header or no rows, or too many bad rows.
    """
    file = path.expanduser()
    text, notes = _text(file)
    preamble = _PREAMBLE.match(text)
    assert preamble is not None  # the pattern matches an empty text too
    text, skipped = text[preamble.end() :], preamble[0].count("\n")
    header = text.partition("\n")[0]
    separator = _separator(text.split("\n", SAMPLE_LINES)[:SAMPLE_LINES])
    if separator not in header:
        raise DataError(
            f"{file}, line {skipped + 1}: one column alone: {show_line(header[:60])!r}. A file of series needs a "
            "column of dates and one of values, separated by comma, semicolon, tab or |."
        )
    bad = BadRows(file, max_bad_rows)
    cells = _parsed(file, text, separator, skipped, bad)
    names = _names(file, skipped + 1, cells)
    num_rows = len(cells) - 1 + bad.num_lines
    cells = cells.iloc[1:].set_axis(names, axis=1).apply(lambda column: column.str.strip())
    cells = cells.mask(cells.apply(lambda column: column.str.lower().isin(MISSING)))
    cells = cells.dropna(how="all")
    bad.check(num_rows)
    if cells.empty:
        raise DataError(f"{file} has a header line ({', '.join(names)}) and no rows under it. Give a file with data.")
    return TextTable(file, cells, bad, notes)


def _text(file: Path) -> tuple[str, tuple[str, ...]]:
    """Returns the text with ``\\n`` as line end, and a note on an encoding other than UTF-8 or UTF-16."""
    if file.is_dir():
        inside = sorted(each.name for each in file.iterdir() if each.suffix.lower() in (".csv", ".tsv", ".txt"))
        hint = f" Write workload.data.path={file / inside[0]}" if inside else " Name a CSV file"
        raise DataError(f"workload.data.path={file} is a folder; forecast reads one file.{hint}.")
    check_file(file)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"workload.data.path={file} can't be read: {error.strerror}. Check path and rights.") from error
    notes: tuple[str, ...] = ()
    try:
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("cp1252", errors="replace")
        notes = (f"{file.name} is not UTF-8; it was read as Windows-1252",)
    if content.startswith((b"PK\x03\x04", b"\x1f\x8b")):
        raise DataError(
            f"{file} is a workbook or is compressed, not text. Save or unpack it as CSV, and name that file."
        )
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DataError(
            f"{file}, line {line}: a zero byte: this is no text. Save it as CSV in UTF-8, and name that file."
        )
    if not text.strip():
        raise DataError(f"{file} is empty. Give a CSV file with a header line, a column of dates and one of values.")
    return text.replace("\r\n", "\n").replace("\r", "\n"), notes


def _separator(lines: list[str]) -> str:
    """Returns the most frequent separator of the header and most lines."""
    counts = {each: [line.count(each) for line in lines if line.strip()] for each in SEPARATORS}
    return max(SEPARATORS, key=lambda each: min(counts[each][0], median(counts[each])))


def _parsed(file: Path, text: str, separator: str, skipped: int, bad: BadRows) -> pd.DataFrame:
    """Returns all rows, including the header, with their lines as index; adds rows that are too long to ``bad``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pd.errors.ParserWarning)
        try:
            cells = pd.read_csv(
                StringIO(text),
                sep=separator,
                header=None,
                dtype=str,
                na_filter=False,
                skip_blank_lines=False,
                skipinitialspace=True,
                on_bad_lines="warn",
            )
        except pd.errors.ParserError as error:
            row = re.search(r"inside string starting at row (\d+)", str(error))
            if row is None:
                raise DataError(f"{file}: {first_line(error)}. Correct that line.") from error
            line = skipped + int(row[1]) + 1
            raise DataError(f'{file}, line {line}: a cell in quotes does not end. Add the missing ".') from error
    said = "\n".join(str(warning.message) for warning in caught)
    too_long = {int(row): int(saw) for row, saw in re.findall(r"Skipping line (\d+): .* saw (\d+)", said)}
    row_N = np.setdiff1d(np.arange(1, len(cells) + len(too_long) + 1), list(too_long))
    breaks_N = np.zeros(len(cells), np.int64)
    if '"' in text:  # quoted cells may contain line breaks
        breaks_N = sum(cells[column].str.count("\n").to_numpy(np.int64) for column in cells)
    shift_N = skipped + np.cumsum(breaks_N)  # line minus row, for each row
    for number, saw in too_long.items():
        line = number + int(shift_N[np.searchsorted(row_N, number) - 1])
        bad.add(line, f"{counted(saw, 'cell')} instead of {cells.shape[1]}")
    line_N = row_N + shift_N - breaks_N
    return cells.set_axis(line_N, axis=0)


def _names(file: Path, line: int, cells: pd.DataFrame) -> list[str]:
    """Returns a name for each column; drops columns without name and cells."""
    names = [show_line(name) for name in cells.iloc[0]]
    if found := next((name for name in names if _DATE.fullmatch(name)), None):
        raise DataError(
            f"{file}, line {line}: the header line is missing, or dates stand side by side: {found!r}. Write the names "
            "of the columns into the first line (date,value), one date a row."
        )
    empty = [place for place, name in enumerate(names) if not name and not (cells[place].str.strip() != "").any()]
    cells.drop(columns=empty, inplace=True)
    names = [name or f"column {place + 1}" for place, name in enumerate(names) if place not in empty]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{file}, line {line}: the column name {twice[0]!r} occurs twice. Give each its own.")
    return names
