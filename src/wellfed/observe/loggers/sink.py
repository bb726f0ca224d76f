"""Defines what takes metrics beside the files, and guards the run against loggers that fail or hang."""

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


class Sink:
    """Receiver of rows from several threads, which passes them to other sinks. It never raises an error of a logger."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """Takes a row, whose axis (``step`` or ``telemetry/time_s``) is among its keys."""
        for sink in self._sinks:
            sink.log(row)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Takes a table, which some loggers show as text."""
        for sink in self._sinks:
            sink.table(name, columns, rows)

    def page(self, name: str, path: Path) -> None:
        """Takes an HTML page, if the logger takes files."""
        for sink in self._sinks:
            sink.page(name, path)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Closes the sink; later rows are dropped."""
        for sink in self._sinks:
            sink.finish(summary, exit_code)


class GuardedSink(Sink):
    """Sink of a logger. Its first error is reported, and no thread waits for it twice.

    One thread calls the logger at a time. If another waits longer than `_PATIENCE_S`, the logger counts as hung: that
    is reported, later rows are dropped, and ``finish`` returns without closing it. The thread inside the logger stays.
    """

    def __init__(self, name: str, on_lost: Callable[[str], None]) -> None:
        """``on_lost`` is called once with the reason why the logger ``name`` can't be written."""
        super().__init__()
        self.name, self._on_lost = name, on_lost
        self._turn = threading.Lock()
        self._is_finished = self._is_hung = False
        self._lost_once = threading.Lock()  # acquired once, by the thread that reports the loss

    def _take(self, row: dict[str, float | int]) -> None:
        """Hands a row to the logger; may raise anything."""

    def _take_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Hands a table to the logger; may raise anything."""

    def _take_page(self, name: str, path: Path) -> None:
        """Hands a file to the logger; may raise anything."""

    def _close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Writes the summary and closes the logger; may raise anything."""

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """Hands a row to the logger, unless it is finished."""
        self._hand(lambda: self._take({key: value for key, value in row.items() if value is not None}))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Hands over a table."""
        self._hand(lambda: self._take_table(name, columns, rows))

    def page(self, name: str, path: Path) -> None:
        """Hands over an HTML page."""
        self._hand(lambda: self._take_page(name, path))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Writes the summary and closes the logger."""

        def close() -> None:
            self._is_finished = True
            self._close(summary, exit_code)

        self._guard(close)

    def _hand(self, call: Callable[[], None]) -> None:
        """Calls in turn, unless the logger hangs or is closed."""
        if not (self._is_hung or self._is_finished):
            self._guard(call)

    def _guard(self, call: Callable[[], None]) -> None:
        """Calls in turn, unless the logger is closed."""
        if not self._turn.acquire(timeout=_PATIENCE_S):
            if not self._is_finished:  # while it closes, an upload may take minutes
                self._is_hung = True
                self.lose(f"no answer for {_PATIENCE_S:g} s")
            return
        reason = None
        try:
            if not self._is_finished:
                call()
        except Exception as error:  # noqa: BLE001  a dead logger must not kill a run
            reason = text_of(error)
        finally:
            self._turn.release()
        if reason is not None:
            self.lose(reason)

    def lose(self, reason: str) -> None:
        """Reports the first loss."""
        if self._lost_once.acquire(blocking=False):
            _LOG.warning("%s can't be written (%s); training goes on, the files have every figure.", self.name, reason)
            self._on_lost(reason)
