"""The way out for the sampling threads: one at a time, and closed when the run is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from wellfed.telemetry.series import Sample
from wellfed.telemetry.source import Tell


class Outlet:
    """Hands samples and events to the run. After `close` nothing gets through: a thread that the driver held up may
    come back when nobody listens any more."""

    def __init__(self, take: Callable[[Sequence[Sample]], None], tell: Tell) -> None:
        self._take, self._tell = take, tell
        self._lock, self._is_closed = threading.RLock(), False

    def take(self, samples: Sequence[Sample]) -> None:
        """The samples of one round."""
        with self._lock:
            if samples and not self._is_closed:
                self._take(samples)

    def tell(self, kind: str, **facts: object) -> None:
        """An event of the run."""
        with self._lock:
            if not self._is_closed:
                self._tell(kind, **facts)

    def close(self) -> None:
        """Nothing more goes out; what is on its way out is awaited."""
        with self._lock:
            self._is_closed = True
