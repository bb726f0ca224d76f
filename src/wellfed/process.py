"""The process: CPUs it was given, forks that end without their parent's last duties, signals that ask it to stop."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

CPUS_AT_START: frozenset[int] | None = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
"""CPUs this process was given; None where the system does not say (macOS, Windows).

An OpenMP runtime that binds its threads (OMP_PROC_BIND, KMP_AFFINITY) ties the thread that loads it to one CPU, and
every thread started from there inherits this. The commands therefore import this module before torch.
"""
MAY_FORK = hasattr(os, "fork") and sys.platform != "darwin"
"""macOS has fork, and its own libraries do not survive it
(https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods)."""
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
STOPS: tuple[signal.Signals, ...] = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that ask a process to end. SIGHUP: the terminal is gone; SIGUSR1: Slurm's warning before a time limit."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Runs imports without garbage collections, and keeps later collections from looking at what the imports made.

    Importing torch and Lightning makes a million objects that live until the end. Collections meanwhile take .4 s of
    CPU time, and the one at the end of Python takes 1.4 s. Changes nothing if torch is imported already.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def fork() -> int:
    """Forks after writing the buffered output, so that only this process writes it; returns as ``os.fork``."""
    flush()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # other threads do not go along
        return os.fork()


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Holds signals back around a fork: in the child they would run this process's handlers.

    The child calls the function that this yields once it has its own handlers; here they are let through at the end.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield let_through
    finally:
        let_through()


def is_ignored_hangup(signum: int) -> bool:
    """Returns whether this is a SIGHUP that the process was started to ignore, as under nohup."""
    return signum == getattr(signal, "SIGHUP", None) and signal.getsignal(signum) is signal.SIG_IGN


def end_by_signals() -> None:
    """Lets a forked process end by `STOPS`, whatever handlers its parent has."""
    for number in STOPS:
        if not is_ignored_hangup(number):
            signal.signal(number, signal.SIG_DFL)


def leave(code: int) -> NoReturn:
    """Ends a forked process without the handlers that its parent was given for its own end."""
    flush()
    os._exit(code)


def exit_code(ended: SystemExit) -> int:
    """Returns the exit code that Python makes of the argument of ``sys.exit``."""
    if ended.code is None:
        return 0
    return ended.code & 0xFF if isinstance(ended.code, int) else 1


def flush() -> None:
    """Writes what is buffered for the terminal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, or closed
            stream.flush()


def die_with_parent(parent: int) -> None:
    """Has the system kill this process when its parent ends, whatever ends it; Linux alone offers it.

    If that is gone already, this process ends here.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def exit_code_of(signum: int) -> int:
    """Returns a shell's exit code for a signal: 130 SIGINT, 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1."""
    return 128 + signum


EXIT_TIME_LIMIT = exit_code_of(getattr(signal, "SIGUSR1", 0))
"""Exit code of a run that was ended by Slurm's warning before its time limit."""


class Stopped(BaseException):
    """A request to stop the run. Not an Exception: nothing on the way may swallow it."""

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

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Catches the signals inside, and restores what was there before outside.

        A run that was stopped and has written its record ends now: further signals are ignored.
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
        """Takes the signals, whoever has them now; not a SIGHUP that is ignored, as under nohup."""
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
