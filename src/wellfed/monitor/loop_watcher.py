"""Common base of the classes that watch a user's own training loop: their options, file, summary and warnings."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from wellfed.monitor.curve_file import open_csv_for
from wellfed.monitor.error_guard import Harmless
from wellfed.monitor.loop_watch import LoopWatch

_LOG = logging.getLogger(__name__)
INTERVAL_S, SHORTEST_S = 0.5, 0.1


class LoopWatcher(Harmless):
    """Base of GPUWatch and GPUCurves."""

    _watch: LoopWatch | None = None
    """The current watch, or the latest one."""
    _is_open = False

    def __init__(self, csv: str | Path | None = None, *, interval_s: float = INTERVAL_S, quiet: bool = False) -> None:
        """
        Args:
            csv: file for the curves, one row per reading. An older file of this kind is replaced, any other is kept.
            interval_s: seconds between two readings, at least 0.1.
            quiet: print nothing at the end. `summary` has the figures.

        Raises:
            TypeError: the interval is not a number.
            ValueError: the interval is too short.
        """
        super().__init__()
        if isinstance(interval_s, bool) or not isinstance(interval_s, (int, float)):
            raise TypeError(f"interval_s={interval_s!r}: must be a number of seconds, as {INTERVAL_S}.")
        if not SHORTEST_S <= interval_s < math.inf:
            raise ValueError(f"interval_s={interval_s}: readings are at least {SHORTEST_S} s apart.")
        self._csv, self._interval_s, self._quiet = csv, float(interval_s), quiet
        self._warned: set[str] = set()

    @property
    def summary(self) -> dict[str, Any]:
        """The figures so far, as plain data; empty if nothing was watched."""
        return {} if self._watch is None else self._watch.summary().entry()

    def lines(self) -> list[str]:
        """Returns the same as text, as printed at the end."""
        return [] if self._watch is None else self._watch.summary().lines()

    def abandon(self) -> None:
        """Stops reading."""
        self._is_open = False
        if self._watch is not None:
            self._watch.stop()

    def _open(self, node: int, *, only: Collection[int] | None = None) -> LoopWatch:
        """Starts a watch. A later one of the same object continues its file."""
        table = open_csv_for(self._csv, node, self._warn, is_new=self._watch is None)
        origin_s = None if self._watch is None else self._watch.origin_s
        self._watch = LoopWatch(interval_s=self._interval_s, table=table, origin_s=origin_s, only=only)
        self._watch.start()
        self._is_open = True
        return self._watch

    def _close(self, *, is_ok: bool) -> bool:
        """Ends the watch; returns whether it was open."""
        if self._watch is None or not self._is_open:
            return False
        self._is_open = False
        if is_ok:
            self._watch.steps.finish()
        self._watch.stop()
        return True

    def _print(self, lines: Sequence[str], of: str = "") -> None:
        if not self._quiet:
            print("\n".join(f"{type(self).__name__}{of}: {line}" for line in lines), flush=True)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _LOG.warning("%s", text)
