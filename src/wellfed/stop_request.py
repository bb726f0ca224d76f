"""SIGINT and SIGTERM as a request that a run answers when it can: at the end of a step, or at once outside one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(BaseException):
    """The run was asked to stop. Not an Exception: nothing on the way may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopRequest:
    """Catches the signals and remembers the first.

    States: idle (a signal raises at once) -> stepping (a step or a validation runs: the first signal waits for its
    end, a second raises) -> idle; any -> finishing (the record is being written: signals change nothing any more).
    ``signum`` is kept in every state, since an exception raised within a ``__del__`` is lost.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.is_stepping = False
        self.is_finishing = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Catch the signals inside, restore what was there before outside."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.is_finishing:
            return
        is_first = self.signum is None
        self.signum = signum if self.signum is None else self.signum
        if not (self.is_stepping and is_first):
            raise Stopped(signum)
