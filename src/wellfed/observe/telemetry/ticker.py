"""Calls a function periodically, in a thread of its own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class Ticker:
    """Thread that calls ``do_round`` every ``interval_s`` without drift. A late round does not delay the next; missed
    rounds are skipped."""

    def __init__(
        self,
        name: str,
        interval_s: float,
        do_round: Callable[[], None],
        at_end: Callable[[], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``at_end``: called in the thread when it ends."""
        self._interval_s, self._do_round, self._at_end, self._now_s = interval_s, do_round, at_end, now_s
        self._wake, self._is_stopping = threading.Event(), False
        self.cpu_s = 0.0
        """CPU seconds of the thread so far."""
        # A daemon thread, so that the process ends even if a driver call never returns.
        self._thread = threading.Thread(target=self._run, name=f"wellfed-{name}", daemon=True)

    def start(self) -> None:
        """Starts the thread; the first round begins at once."""
        self._thread.start()

    def nudge(self) -> None:
        """Begins an extra round now."""
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread after the current round."""
        self._is_stopping = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Returns whether the thread ended within this time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        beat_at_s = self._now_s()
        while not self._is_stopping:
            self._do_round()
            self.cpu_s = time.thread_time()
            beat_at_s = next_beat(beat_at_s, self._now_s(), self._interval_s)
            self._wake.wait(min(max(0.0, beat_at_s - self._now_s()), threading.TIMEOUT_MAX))
            self._wake.clear()
        self._at_end()
        self.cpu_s = time.thread_time()


def next_beat(beat_at_s: float, now_s: float, interval_s: float) -> float:
    """Returns the first beat after now, where beats are ``beat_at_s`` plus whole intervals."""
    next_at_s = beat_at_s + interval_s * max(0, math.floor((now_s - beat_at_s) / interval_s) + 1)
    return next_at_s if next_at_s > now_s else next_at_s + interval_s  # the division may have been rounded up
