"""Defines the interface of loggers, and protects the run from loggers that fail or hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellfed.errors import text_of

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 10.0
"""Seconds that a thread waits for another's call to a logger, which usually takes under a millisecond."""
PICTURES = frozenset((".png", ".jpg", ".jpeg"))
"""Suffixes of the pictures that loggers show."""


class Sink:
    """Receiver of rows from several threads, forwarded to other sinks. Never raises an error of a logger."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """Takes a row, which includes its axis (``step`` or ``telemetry/time_s``)."""
        for sink in self._sinks:
            sink.log(row)

    @property
    def shows_media(self) -> bool:
        """Whether a logger shows pictures and tables."""
        return any(sink.shows_media for sink in self._sinks)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None = None) -> None:
        """Takes a table, which some loggers show as text. ``step=None``: it is of the whole run."""
        for sink in self._sinks:
            sink.table(name, columns, rows, step)

    def file(self, name: str, path: Path, step: int | None = None) -> None:
        """Takes an HTML page or a picture, if the logger takes files. ``step=None``: it is of the whole run."""
        for sink in self._sinks:
            sink.file(name, path, step)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Closes the sink; later rows are dropped."""
        for sink in self._sinks:
            sink.finish(summary, exit_code)


class GuardedSink(Sink):
    """Sink of a logger that may fail or hang. Its first error is reported.

    One thread calls the logger at a time. If another waits longer than `_PATIENCE_S`, the logger counts as hung. This
    is reported, later rows are dropped, and ``finish`` returns without closing it. A logger's class has the methods
    ``_take``, ``_take_table``, ``_take_file`` and ``_close``, which may raise anything.
    """

    _take: Callable[[dict[str, float | int]], None]
    _take_table: Callable[[str, Sequence[str], Sequence[Sequence[Any]], int | None], None]
    _take_file: Callable[[str, Path, int | None], None]
    _close: Callable[[Mapping[str, Any], int], None]

    def __init__(self, label: str = "", on_lost: Callable[[str], None] = lambda reason: None) -> None:
        """
        Args:
            label: name of the logger, for messages.
            on_lost: called once with the reason if the logger can't be written.
        """
        super().__init__()
        self.label, self._on_lost = label, on_lost
        self._lock = threading.Lock()
        self._is_finished = self._is_hung = False
        self._lost_once = threading.Lock()  # acquired once, by the thread that reports the loss

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """Passes a row to the logger."""
        self._guard(lambda: self._take({key: value for key, value in row.items() if value is not None}))

    @property
    def shows_media(self) -> bool:
        """Whether the logger shows pictures and tables."""
        return not (self._is_hung or self._is_finished)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None = None) -> None:
        """Passes a table to the logger."""
        self._guard(lambda: self._take_table(name, columns, rows, step))

    def file(self, name: str, path: Path, step: int | None = None) -> None:
        """Passes an HTML page or a picture to the logger."""
        self._guard(lambda: self._take_file(name, path, step))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Writes the summary and closes the logger."""
        self._guard(lambda: self._close(summary, exit_code), closes=True)

    def _guard(self, call: Callable[[], None], *, closes: bool = False) -> None:
        """Runs a call under the lock. A logger that hangs may still be closed."""
        if self._is_finished or (self._is_hung and not closes):
            return
        if not self._lock.acquire(timeout=_PATIENCE_S):
            if not self._is_finished:  # closing may take minutes for an upload
                self._is_hung = True
                self.lose(f"no answer for {_PATIENCE_S:g} s")
            return
        try:
            if not self._is_finished:
                self._is_finished = closes
                call()
        except Exception as error:  # noqa: BLE001  a failing logger must not end a run
            self.lose(text_of(error))
        finally:
            self._lock.release()

    def lose(self, reason: str) -> None:
        """Reports the first loss."""
        if self._lost_once.acquire(blocking=False):
            _LOG.warning("%s can't be written (%s); training goes on, the files have every figure.", self.label, reason)
            self._on_lost(reason)
