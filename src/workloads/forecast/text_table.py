"""Reads a file of separated text into columns of cells, with the line that each row stands in."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wellfed import DataError, check_file
from wellfed.units import counted, show_line

SEPARATORS = (",", ";", "\t", "|")
SAMPLE_ROWS = 50
"""Rows by which the separator is told."""
BLOCK_CELLS = 2**16
"""Read before they are put into columns."""
MOST_SHARED = 2**16
"""Different cells of a column, about, that are looked up by their text."""
_FOREIGN = {b"PK\x03\x04": "a workbook or an archive", b"\x1f\x8b": "compressed (gzip)", b"PAR1": "a Parquet file"}
_DATE = re.compile(r"\s*(\d{4}[-/.]\d{1,2}([-/.]\d{1,2})?|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})\b.*")


class BadRows:
    """Lines in which something can't be read: counted, one of them kept, an error beyond ``limit``."""

    def __init__(self, file: Path, limit: int) -> None:
        self._file, self._limit = file, limit
        self._lines: set[int] = set()
        self._one = ""

    def add(self, line: int, reason: str) -> None:
        """Take note of what is wrong in a line (from 1).

        Raises:
            DataError: there are more than ``limit`` now.
        """
        self._lines.add(line)
        self._one = self._one or f"line {line}: {reason}"
        if len(self._lines) > self._limit:
            raise DataError(
                f"{self._file}: more bad rows than workload.data.max_bad_rows={self._limit}, such as {self._one}. "
                "Correct the file, or write workload.data.max_bad_rows=N to skip as many."
            )

    def check(self, num_rows: int) -> None:
        """Stop where half of the rows are bad: then the file is of another form.

        Raises:
            DataError: at least half of them are.
        """
        if self._lines and 2 * len(self._lines) >= num_rows:
            raise DataError(
                f"{self._file}: {len(self._lines)} of {counted(num_rows, 'row')} can't be read, such as {self._one}. "
                "Correct the file, or say by workload.data.date_column, target, series_column, decimal how to read it."
            )

    def notes(self) -> tuple[str, ...]:
        """One sentence if there were any."""
        if not self._lines:
            return ()
        return (f"{counted(len(self._lines), 'bad row')} skipped, in whole or in part, such as {self._one}",)


@dataclass(frozen=True)
class TextTable:
    """Cells by column, without the blanks around them."""

    file: Path
    names: list[str]
    """As the header has them; ``column 2`` where it has none."""
    columns: list[list[str]]
    lines: list[int]
    """Of each row, from 1."""
    bad: BadRows
    notes: tuple[str, ...]

    def is_unnamed(self, place: int) -> bool:
        """Whether the header has no name for the column."""
        return self.names[place] == f"column {place + 1}"

    def place(self, name: str, knob: str) -> int:
        """Of the column that a knob names, in whatever case.

        Raises:
            DataError: there is none.
        """
        for wanted, names in (
            (name.strip(), self.names),
            (name.strip().casefold(), [other.casefold() for other in self.names]),
        ):
            if wanted in names:
                return names.index(wanted)
        raise DataError(
            f"{self.file} has no column {name!r}. Write workload.data.{knob}=NAME with one of "
            f"{', '.join(map(repr, self.names))}."
        )


def read_text_table(path: Path, max_bad_rows: int) -> TextTable:
    """The table in a file with a header line: separated by comma, semicolon, tab or ``|``, in UTF-8, UTF-16 or
    Windows-1252, with any line ends.

    Raises:
        DataError: unreadable, not text, without header or rows, with too many bad rows.
    """
    file = path.expanduser()
    text, notes = _decoded(file, _content(file))
    text, skipped = _without_preamble(text)
    separator = _separator(text)
    if separator is None:
        raise DataError(
            f"{file}, line {skipped + 1}: one column alone: {show_line(text[:60].splitlines()[0])!r}. A file of series "
            "needs a column of dates and one of values, separated by comma, semicolon, tab or |."
        )
    bad = BadRows(file, max_bad_rows)
    rows = _rows(file, text, separator, skipped, bad)
    _, header = next(rows)
    names = _names(file, skipped + 1, header)
    columns, lines, num_rows = Columned(len(names)), [], 0
    for line, row in rows:
        num_rows += 1
        while len(row) > len(names) and not row[-1].strip():
            row.pop()
        if not "".join(row).strip():
            continue
        if len(row) == len(names):
            columns.add(row)
            lines.append(line)
        else:
            bad.add(line, f"{counted(len(row), 'cell')} instead of {len(names)}")
    bad.check(num_rows)
    if not lines:
        raise DataError(f"{file} has a header line ({', '.join(names)}) and no rows under it. Give a file with data.")
    return TextTable(file, names, columns.all(), lines, bad, notes)


class Columned:
    """Takes rows and gives columns; cells of the same text, such as dates and names of series, become one object."""

    def __init__(self, num_columns: int) -> None:
        self._columns: list[list[str]] = [[] for _ in range(num_columns)]
        self._shared: list[dict[str, str]] = [{} for _ in range(num_columns)]
        self._waiting: list[str] = []
        """Cells of the last rows, row by row: a list for each row would be dear to make and to keep."""

    def add(self, row: list[str]) -> None:
        """One row, of a cell for each column."""
        self._waiting += row
        if len(self._waiting) >= BLOCK_CELLS:
            self._take()

    def all(self) -> list[list[str]]:
        """The columns, without the blanks around their cells."""
        self._take()
        return self._columns

    def _take(self) -> None:
        for number, (column, shared) in enumerate(zip(self._columns, self._shared, strict=True)):
            cells = map(str.strip, self._waiting[number :: len(self._columns)])
            if len(shared) < MOST_SHARED:
                column += [shared.setdefault(cell, cell) for cell in cells]
            else:
                column += [shared.get(cell, cell) for cell in cells]
        self._waiting.clear()


def _content(file: Path) -> bytes:
    if file.is_dir():
        inside = sorted(each.name for each in file.iterdir() if each.suffix.lower() in (".csv", ".tsv", ".txt"))
        hint = f" Write workload.data.path={file / inside[0]}" if inside else " Name a CSV file"
        raise DataError(f"workload.data.path={file} is a folder; forecast reads one file.{hint}.")
    check_file(file)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"workload.data.path={file} can't be read: {error.strerror}. Check path and rights.") from error
    for magic, what in _FOREIGN.items():
        if content.startswith(magic):
            raise DataError(f"{file} is {what}, not text. Save or unpack it as CSV, and name that file.")
    return content


def _decoded(file: Path, content: bytes) -> tuple[str, tuple[str, ...]]:
    """The text, and what is to be said of its encoding."""
    head = content[:400]
    encoding = "utf-8-sig"
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    elif head[1::2].count(0) > len(head) // 4:
        encoding = "utf-16-le"
    elif head[::2].count(0) > len(head) // 4:
        encoding = "utf-16-be"
    notes: tuple[str, ...] = ()
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        text = content.decode("cp1252", errors="replace")
        notes = (f"{file.name} is not UTF-8; it was read as Windows-1252",)
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise DataError(
            f"{file}, line {line}: a zero byte: this is no text. Save it as CSV in UTF-8, and name that file."
        )
    if not text.strip():
        raise DataError(f"{file} is empty. Give a CSV file with a header line, a column of dates and one of values.")
    return text, notes


def _without_preamble(text: str) -> tuple[str, int]:
    """The text from its header on, and how many lines were before it: blank ones, comments, and Excel's ``sep=;``."""
    skipped = 0
    while True:
        line, end, rest = text.partition("\n")
        if not end or not (not line.strip() or line.startswith("#") or re.fullmatch(r"sep=.\s*", line)):
            return text, skipped
        text, skipped = rest, skipped + 1


def _separator(text: str) -> str | None:
    """The one by which most rows have as many cells as the header, and the header the most; None if it has one cell."""
    best: tuple[tuple[int, int], str | None] = (0, 0), None
    sample = "".join(io.StringIO(text, newline="").readlines(100 * SAMPLE_ROWS)) or text
    for separator in SEPARATORS:
        widths = []
        try:
            for row in csv.reader(io.StringIO(sample, newline=""), delimiter=separator):
                if row:
                    widths.append(len(row))
                if len(widths) == SAMPLE_ROWS:
                    break
        except csv.Error:
            pass
        if widths and widths[0] > 1 and (rank := (widths.count(widths[0]), widths[0])) > best[0]:
            best = rank, separator
    return best[1]


def _rows(file: Path, text: str, separator: str, skipped: int, bad: BadRows) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, each with its first line."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    while True:
        line = skipped + reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "end of data" in str(error) or "limit" in str(error):
                raise DataError(f'{file}, line {line}: a cell in quotes does not end. Add the missing ".') from error
            bad.add(line, f"quotes within a cell ({error})")
            continue
        if row:
            yield line, row


def _names(file: Path, line: int, header: list[str]) -> list[str]:
    names = [show_line(name) for name in header]
    while len(names) > 1 and not names[-1]:
        names.pop()  # a separator at the line's end
    if found := next((name for name in names if _DATE.fullmatch(name)), None):
        raise DataError(
            f"{file}, line {line}: the header line is missing, or dates stand side by side: {found!r}. Write the names "
            "of the columns into the first line (date,value), one date a row."
        )
    names = [name or f"column {number}" for number, name in enumerate(names, 1)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{file}, line {line}: the column name {twice[0]!r} occurs twice. Give each its own.")
    return names
