"""Writes the csv tables of a run folder. A killed run loses at most one second of rows."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from wellfed.record import LONGEST_LINE, lines_of, regular, write_atomically

FLUSH_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Maximum seconds between attempts to write to a full disk. Each may use space that another file needs."""
MOST_ROWS = 20_000
"""Maximum number of rows held back. Beyond it the oldest are dropped."""


class CsvTable:
    """One csv file, safe for several threads. A failed write (disk full) is reported and retried later. The writing
    thread calls ``on_error``, which must not use the table."""

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        on_error: Callable[[OSError], None],
        *,
        flush_s: float = FLUSH_S,
        line: Callable[[Any], str] | None = None,
    ) -> None:
        """
        Args:
            line: returns the line of a row, without its end; None = rows are mappings, with empty cells for missing
                columns.
            flush_s: seconds for which rows may be held back; 0 = each `append` writes before it returns.
        """
        self.path, self._columns, self._on_error, self._flush_s = path, tuple(columns), on_error, flush_s
        self._lock = threading.Lock()  # rows appended during a write must not be lost or written twice
        self._line = line
        # Rows are formatted many at a time, at a third of the cost.
        self._rows: deque[Any] = deque(maxlen=MOST_ROWS)
        self._flushed_at_s, self._pause_s = time.monotonic(), 0.0

    def append(self, *rows: Any) -> None:
        """Adds rows, written together. They must not change afterwards."""
        with self._lock:
            self._rows += rows
            if time.monotonic() - self._flushed_at_s >= max(self._flush_s, self._pause_s):
                self._flush()

    def flush(self) -> None:
        """Writes the rows held back. After a failure they are kept for the next try."""
        with self._lock:
            self._flush()

    def cut_after(self, column: str, last: float) -> int:
        """Drops rows whose ``column`` is above ``last``, and an incomplete last line. A resumed run writes them again.

        Returns the number of other damaged lines, which are dropped too. A table of an earlier version is rewritten
        with these columns.
        """
        with self._lock:
            lines, torn = _cells_of(self.path, goes_on=True)
            if not lines:
                return 0
            damaged, names = 0, lines[0]
            if _is_damaged(names, self._columns, column):
                damaged, names = 1, list(self._columns)
            index = names.index(column)
            whole = [line for line in lines[1:] if len(line) == len(names) and _figure(line[index]) is not None]
            damaged += len(lines) - 1 - len(whole)
            kept = [line for line in whole if (_figure(line[index]) or 0) <= last]
            if names != list(self._columns):
                rows = [dict(zip(names, line, strict=True)) for line in kept]
                names, kept = list(self._columns), [[row.get(name, "") for name in self._columns] for row in rows]
            if damaged or torn or len(kept) < len(lines) - 1 or names != lines[0]:
                write_atomically(self.path, _lines([names, *kept]))
            return damaged

    def drop(self, columns: tuple[str, ...], keys: set[tuple[str, ...]]) -> None:
        """Drops written rows whose cells in ``columns`` are one of ``keys``."""
        with self._lock:
            lines, _ = _cells_of(self.path, goes_on=True)
            if not lines or not set(columns) <= set(lines[0]):
                return
            size, indices = len(lines[0]), [lines[0].index(name) for name in columns]
            kept = [line for line in lines if len(line) != size or tuple(line[index] for index in indices) not in keys]
            if len(kept) < len(lines):
                write_atomically(self.path, _lines(kept))

    def _flush(self) -> None:
        self._flushed_at_s = time.monotonic()
        if not self._rows:
            return
        try:
            self._write()
        except OSError as error:
            self._pause_s = min(max(FLUSH_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._on_error(error)
        else:
            self._rows.clear()
            self._pause_s = 0.0

    def _write(self) -> None:
        # Python's buffered files would keep unwritten rows and write them at close.
        extra = getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # waits for no reader of a named pipe
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | extra, 0o666)
        try:
            start = os.fstat(descriptor).st_size
            left = memoryview(self._text(has_columns=start == 0).encode())
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                # Remove a half-written row, or the next try would append to it.
                with contextlib.suppress(OSError):  # the first error is reported
                    os.ftruncate(descriptor, start)
                raise
        finally:
            os.close(descriptor)

    def _text(self, *, has_columns: bool) -> str:
        columns = _lines([self._columns]) if has_columns else ""
        if self._line is not None:
            return columns + "\n".join([*map(self._line, self._rows), ""])
        return columns + _lines([[cell(row.get(name)) for name in self._columns] for row in self._rows])


def column(path: Path, name: str) -> list[float]:
    """Returns a column's finite numbers; empty if the file or column is missing.

    Raises:
        OSError: the file can't be read.
    """
    lines, _ = _cells_of(path, goes_on=False)
    if not lines or name not in lines[0]:
        return []
    index = lines[0].index(name)
    figures = (_figure(line[index]) for line in lines[1:] if len(line) == len(lines[0]))
    return [figure for figure in figures if figure is not None]


def _is_damaged(names: Sequence[str], columns: Sequence[str], needed: str) -> bool:
    """Returns whether a header is a damaged copy of these columns, not the columns of another version."""
    alike = sum(one == other for one, other in zip(names, columns, strict=False))
    return needed not in names or (names != list(columns) and len(names) == len(columns) and 2 * alike >= len(columns))


def _cells_of(path: Path, *, goes_on: bool) -> tuple[list[list[str]], bool]:
    """Returns the cells of each complete line (none with an open quote), and whether an incomplete line follows.

    Args:
        goes_on: as in `lines_of`.
    """
    if not path.exists():
        return [], False
    found, is_torn = list[list[str]](), False
    with regular(path).open(encoding="utf-8", errors="replace", newline="\n") as stream:
        for line in lines_of(stream, goes_on=goes_on):
            is_torn = not line.endswith("\n") and len(line) < LONGEST_LINE  # an incomplete line may lack digits
            found += [] if is_torn else [_cells(line.removesuffix("\n"))]
    return found, is_torn


def _cells(line: str) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return [] if line.count('"') % 2 else next(csv.reader([line]), [])
    except csv.Error:  # a cell beyond csv's limit
        return []


def _figure(cell: str) -> float | None:
    """Returns the number; None if it is not finite or not a number, as after a power cut."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _lines(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


LARGE = 1e3
"""Numbers from here on have three decimals, so times keep their milliseconds in long runs; others six digits."""


def cell(value: object) -> str:
    """Returns a value as the text of a cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < LARGE else f"{value:.3f}"
    return str(value)
