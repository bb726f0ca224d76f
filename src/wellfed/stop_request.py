"""Turns signals that ask for an end into a request: a run answers it after a step, or at once outside one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from wellfed.forking import STOPS, is_ignored_hangup


def exit_code_of(signum: int) -> int:
    """Exit code of what a signal has ended, as a shell has it: 130 SIGINT, 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1."""
    return 128 + signum


EXIT_TIME_LIMIT = exit_code_of(getattr(signal, "SIGUSR1", 0))
"""Exit code of a run that was ended by Slurm's warning before its time limit."""


class Stopped(BaseException):
    """The run was asked to stop. Not an Exception: nothing on the way may swallow it."""

    def __init__(self, signum: int, *, is_of_all: bool = False) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.is_of_all = is_of_all
        """All ranks stop, at the same step."""


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
        """Catch the signals inside, restore what was there before outside.

        A run that was stopped and has written its record ends now: another signal on its last metres is ignored.
        """
        before = {number: signal.getsignal(number) for number in STOPS}
        self.install()
        try:
            yield self
        finally:
            is_ending = self.is_finishing and self.signum is not None
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if is_ending else handler)

    def install(self) -> None:
        """Take the signals, whoever has them now; not a SIGHUP that is ignored, as under nohup."""
        for number in STOPS:
            if not is_ignored_hangup(number):
                signal.signal(number, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.is_finishing:
            return
        if self.signum is None:
            self.signum = signum
            if self.is_stepping:
                return
        raise Stopped(signum)
