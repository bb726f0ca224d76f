"""Hands what the sampling threads have read to the run, one thread at a time, until the run is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from wellfed.observe.telemetry.series import Sample
from wellfed.record import EventKind, OnEvent

PATIENCE_S = 1.0
"""How long an event, or the end of a run, waits for a thread that is on its way out."""


class Outlet:
    """Hands samples and events to the run. After `close` nothing gets through: a thread that the driver held up may
    come back when nobody listens any more."""

    def __init__(
        self,
        take: Callable[[Sequence[Sample]], None],
        on_event: OnEvent,
        publish: Callable[[Sequence[Sample]], None] = lambda samples: None,
    ) -> None:
        """
        Args:
            take: gets the samples, never from two threads at once; must not block.
            publish: gets them afterwards, from any number of threads; may block, and then only its thread stands still.
        """
        self._take, self._on_event, self._publish = take, on_event, publish
        self._turn, self._is_closed = threading.RLock(), False

    def take(self, stamped: Callable[[], Sequence[Sample]]) -> None:
        """The samples of one round, stamped when it is their turn: so times never go back from row to row."""
        with self._turn:
            samples = [] if self._is_closed else stamped()
            if samples:
                self._take(samples)
        if samples and not self._is_closed:
            self._publish(samples)

    def event(self, kind: EventKind, **facts: Any) -> None:
        """An event of the run."""
        if self._turn.acquire(timeout=PATIENCE_S):
            try:
                if not self._is_closed:
                    self._on_event(kind, **facts)
            finally:
                self._turn.release()

    def close(self) -> None:
        """Nothing more goes out; what is on its way is awaited for a moment."""
        self._is_closed = True
        if self._turn.acquire(timeout=PATIENCE_S):
            self._turn.release()
