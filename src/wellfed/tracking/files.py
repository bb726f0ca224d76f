"""Append-only csv tables of a run folder, flushed often enough that a kill loses a second at most."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FLUSH_S = 1.0


class CsvTable:
    """One csv file. A write that fails (disk full) is reported once, and later rows are tried again."""

    def __init__(self, path: Path, columns: Sequence[str], on_error: Callable[[OSError], None]) -> None:
        self.path, self._columns, self._on_error = path, tuple(columns), on_error
        self._rows: list[str] = []
        self._flushed_at_s = time.monotonic()

    def append(self, row: Mapping[str, object]) -> None:
        """Add a row; columns that the mapping lacks stay empty."""
        self._rows.append(_line([_cell(row.get(column)) for column in self._columns]))
        if time.monotonic() - self._flushed_at_s >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is held back. On failure it is held on for the next try."""
        self._flushed_at_s = time.monotonic()
        if not self._rows:
            return
        try:
            is_new = not self.path.exists() or self.path.stat().st_size == 0
            with self.path.open("a", encoding="utf-8", newline="") as stream:
                start = stream.tell()
                try:
                    stream.write((_line(self._columns) if is_new else "") + "".join(self._rows))
                    stream.flush()
                except OSError:
                    # No half row may stay, or the next try would glue another to it.
                    stream.truncate(start)
                    raise
        except OSError as error:
            self._on_error(error)
        else:
            self._rows.clear()


def cut_after(path: Path, column: str, last: float) -> None:
    """Drop the rows whose ``column`` is above ``last`` (a resumed run writes them anew), and a torn last line."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="") as stream:
        lines = list(csv.reader(stream))
    if not lines or column not in lines[0]:
        return
    place = lines[0].index(column)
    kept = [line for line in lines[1:] if len(line) == len(lines[0]) and line[place] and float(line[place]) <= last]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(_line(line) for line in [lines[0], *kept]), encoding="utf-8", newline="")
    temporary.replace(path)


def _line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e5 else f"{value:.3f}"
    return str(value)
