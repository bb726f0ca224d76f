"""Writes the csv tables of a run folder. A killed run loses at most one second of rows."""

from __future__ import annotations

import csv
import errno
import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellfed.record.files import write_atomically

FLUSH_S = 1.0


class CsvTable:
    """One csv file, safe for several threads. Rows that can't be written (disk full) are reported and dropped. The
    writing thread calls ``on_error``, which must not use the table."""

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
        self._rows: list[Any] = []
        self._flushed_at_s = time.monotonic()

    def append(self, *rows: Any) -> None:
        """Adds rows, written together. They must not change afterwards."""
        with self._lock:
            self._rows += rows
            if time.monotonic() - self._flushed_at_s >= self._flush_s:
                self._flush()

    def flush(self) -> None:
        """Writes the rows held back."""
        with self._lock:
            self._flush()

    def keep(self, is_kept: Callable[[Mapping[str, str]], bool]) -> None:
        """Drops written rows for which ``is_kept`` is false, and an incomplete last line. A resumed run writes them
        again.

        Raises:
            OSError, ValueError, csv.Error: the file can't be read.
        """
        with self._lock:
            if rows := list(read_rows(self.path)):
                kept = (row.values() for row in rows if is_kept(row))
                write_atomically(self.path, _lines([self._columns, *kept]))
            else:
                self.path.unlink(missing_ok=True)

    def _flush(self) -> None:
        self._flushed_at_s = time.monotonic()
        rows, self._rows = self._rows, []
        try:
            if rows:
                self._write(rows)
        except OSError as error:
            self._on_error(error)

    def _write(self, rows: Sequence[Any]) -> None:
        line = self._line or (lambda row: _lines([[cell(row.get(name)) for name in self._columns]])[:-1])
        with self.path.open("ab", buffering=0) as stream:
            start = stream.tell()
            text = ("" if start else _lines([self._columns])) + "\n".join([*map(line, rows), ""])
            if (stream.write(text.encode()) or 0) < len(text.encode()):
                stream.truncate(start)  # a half-written row would garble the next one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_rows(path: Path) -> Iterable[dict[str, str]]:
    """Yields the complete rows of a table by column; none if the file is missing. A killed process may have left a part
    of the last line, which is dropped.

    Raises:
        OSError, ValueError, csv.Error: the file can't be read.
    """
    if path.exists():
        text = path.read_text(encoding="utf-8")
        yield from csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))


def _lines(rows: Iterable[Iterable[str]]) -> str:
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
