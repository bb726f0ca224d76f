"""Says what takes figures beside the files, and keeps a logger that fails or hangs from harming the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellfed.errors import text_of

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 10.0
"""How long a thread waits for another's call to a logger, which takes well under a millisecond."""


class Sink:
    """Takes rows of figures from several threads, beside the files; this one drops them.

    None raises for its own troubles.
    """

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """One row; it carries its own axis (``step`` or ``telemetry/time_s``) among its keys."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table as one figure of that name, or as text, where the logger has such."""

    def page(self, name: str, path: Path) -> None:
        """An HTML page of that name, where the logger takes files."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """No more rows count: one that a thread still hands over is dropped."""


class Sinks(Sink):
    """Several, each of which gets everything."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """To each."""
        for sink in self._sinks:
            sink.log(row)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """To each."""
        for sink in self._sinks:
            sink.table(name, columns, rows)

    def page(self, name: str, path: Path) -> None:
        """To each."""
        for sink in self._sinks:
            sink.page(name, path)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Each."""
        for sink in self._sinks:
            sink.finish(summary, exit_code)


class GuardedSink(Sink):
    """A logger's; what it can't take is noted once, and no thread waits for it twice.

    Calls take turns. A thread whose turn does not come within `_PATIENCE_S` takes the logger for hung: that is noted,
    later rows are dropped without waiting, and ``finish`` returns even if the logger can't be closed. Only the thread
    that sits in the logger itself can't be helped.
    """

    def __init__(self, name: str, on_lost: Callable[[str], None]) -> None:
        """``on_lost`` is told once why the logger ``name`` can't be written."""
        self.name, self._on_lost = name, on_lost
        self._turn = threading.Lock()
        self._is_finished = self._is_hung = False
        self._lost_once = threading.Lock()  # taken once, by the thread that reports the loss

    def _take(self, row: dict[str, float | int]) -> None:
        """Hand a row to the logger; may raise anything."""

    def _take_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Hand a table to the logger; may raise anything."""

    def _take_page(self, name: str, path: Path) -> None:
        """Hand a file to the logger; may raise anything."""

    def _close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Write the summary and close the logger; may raise anything."""

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """Hand a row to the logger. Nothing after ``finish``."""
        self._hand(lambda: self._take({key: value for key, value in row.items() if value is not None}))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Hand over a table."""
        self._hand(lambda: self._take_table(name, columns, rows))

    def page(self, name: str, path: Path) -> None:
        """Hand over an HTML page."""
        self._hand(lambda: self._take_page(name, path))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Write the summary and close the logger."""

        def close() -> None:
            self._is_finished = True
            self._close(summary, exit_code)

        self._guard(close)

    def _hand(self, call: Callable[[], None]) -> None:
        """Make a call in turn, unless the logger hangs or is closed."""
        if not (self._is_hung or self._is_finished):
            self._guard(call)

    def _guard(self, call: Callable[[], None]) -> None:
        """Make a call in turn, unless the logger is closed."""
        if not self._turn.acquire(timeout=_PATIENCE_S):
            if not self._is_finished:  # or it is busy with that: an upload may take minutes
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
        """Tell of a loss, if it is the first."""
        if self._lost_once.acquire(blocking=False):
            _LOG.warning("%s can't be written (%s); training goes on, the files have every figure.", self.name, reason)
            self._on_lost(reason)
