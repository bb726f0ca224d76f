"""Forks processes that end without their parent's last duties and do not outlive it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

MAY_FORK = hasattr(os, "fork") and sys.platform != "darwin"
"""macOS has fork, and its own libraries do not survive it
(https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods)."""
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
STOPS: tuple[signal.Signals, ...] = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that ask a process to end. SIGHUP: the terminal is gone; SIGUSR1: Slurm's warning before a time limit."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def fork() -> int:
    """As ``os.fork``; what was printed so far is written by this process alone."""
    flush()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # other threads do not go along
        return os.fork()


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Around a fork: a signal that the child gets before it has let go of this process's handlers would run them there.

    The child calls what this hands out when it has; here they are let through at the end.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield let_through
    finally:
        let_through()


def is_ignored_hangup(signum: int) -> bool:
    """Whether this is a SIGHUP that the process was started to ignore, as under nohup."""
    return signum == getattr(signal, "SIGHUP", None) and signal.getsignal(signum) is signal.SIG_IGN


def end_by_signals() -> None:
    """In a forked process: let it end by `STOPS`, whatever handlers its parent has."""
    for number in STOPS:
        if not is_ignored_hangup(number):
            signal.signal(number, signal.SIG_DFL)


def leave(code: int) -> NoReturn:
    """End a forked process without the handlers that its parent was given for its own end."""
    flush()
    os._exit(code)


def exit_code(ended: SystemExit) -> int:
    """As Python makes it of what ``sys.exit`` was given."""
    if ended.code is None:
        return 0
    return ended.code & 0xFF if isinstance(ended.code, int) else 1


def flush() -> None:
    """Write what is buffered for the terminal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, or closed
            stream.flush()


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent ends, whatever ends it; Linux alone offers it.

    If that is gone already, this process ends here.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
