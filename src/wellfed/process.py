"""Handles the process: its CPUs, forks that skip the parent's exit handlers, and signals that ask it to stop."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

CPUS_AT_START: frozenset[int] | None = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
"""CPUs this process may use; None if the system does not report them (macOS, Windows).

An OpenMP runtime that binds its threads (OMP_PROC_BIND, KMP_AFFINITY) ties the thread that loads it to one CPU. Threads
started from there inherit this. The commands therefore import this module before torch.
"""
MAY_FORK = hasattr(os, "fork") and sys.platform != "darwin"
"""False on macOS, whose libraries do not survive a fork
(https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods)."""
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
STOPS: tuple[signal.Signals, ...] = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals that ask a process to end. SIGHUP: the terminal closed. SIGUSR1: Slurm's warning before a time limit."""
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
    """Forks as ``os.fork``. Only the parent writes output that was buffered, and finalises garbage from before."""
    flush()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # other threads are not copied
        own = os.fork()
    if not own:
        gc.freeze()  # a store's destructor would join threads that the child lacks, and abort it
    return own


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Blocks `STOPS` around a fork, since the child would run the parent's handlers.

    The child calls the yielded function once it has its own handlers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield let_through
    finally:
        let_through()


def is_ignored_hangup(signum: int) -> bool:
    """Returns whether a signal is SIGHUP and the process ignores it, as under nohup."""
    return signum == getattr(signal, "SIGHUP", None) and signal.getsignal(signum) is signal.SIG_IGN


def end_by_signals() -> None:
    """Restores the default action of `STOPS` in a forked process."""
    for number in STOPS:
        if not is_ignored_hangup(number):
            signal.signal(number, signal.SIG_DFL)


def leave(code: int) -> NoReturn:
    """Ends a forked process without running the parent's exit handlers."""
    flush()
    os._exit(code)


def exit_code(ended: SystemExit) -> int:
    """Returns the exit code that Python derives from the argument of ``sys.exit``."""
    if ended.code is None:
        return 0
    return ended.code & 0xFF if isinstance(ended.code, int) else 1


def flush() -> None:
    """Flushes stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, or closed
            stream.flush()


def die_with_parent(parent: int) -> None:
    """Lets Linux kill this process when its parent ends; exits if that is gone. Does nothing on other systems."""
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
"""Exit code of a run ended by Slurm's warning before its time limit."""


class Stopped(BaseException):
    """A request to stop the run. Not an Exception, so that no handler swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopRequest:
    """Catches the signals and remembers the first.

    States:

    - idle: a signal raises at once.
    - stepping (a step, a validation or the end of an epoch runs): the first signal waits for its end, a second raises.
    - finishing (the record is being written): signals change nothing any more.

    ``signum`` is kept in every state, since an exception raised within a ``__del__`` is lost.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.is_stepping = False
        self.is_finishing = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Catches the signals inside, and restores the previous handlers afterwards.

        If the run was stopped and has written its record, further signals are ignored.
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
        """Replaces the handlers of the signals, except an ignored SIGHUP, as under nohup."""
        for number in STOPS:
            if not is_ignored_hangup(number):
                signal.signal(number, self._on_signal)

    def begin_wait(self) -> None:
        """Lets a signal raise at once from now on, also one that has come before. Set ``is_stepping`` at its end."""
        self.is_stepping = False
        if self.signum is not None:
            raise Stopped(self.signum)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.is_finishing:
            return
        if self.signum is None:
            self.signum = signum
            if self.is_stepping:
                return
        raise Stopped(signum)


def is_alive(record: Mapping[str, Any]) -> bool:
    """Returns whether the process of a running record may still run. Processes on other hosts count as alive."""
    if record.get("host_name") != socket.gethostname():
        return True
    pid = int(record.get("pid") or 0)
    if record.get("boot_id") != boot_id() or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # exists, but belongs to another user
    stat = _stat(pid)
    if stat is not None and stat[0] in "ZX":  # it has ended. In a container without an init its number stays in use
        return False
    then, now = record.get("process_start"), process_start(pid)
    return then is None or now is None or then == now  # another process may have the same id


def process_start(pid: int) -> int | None:
    """Returns the start of a process in clock ticks since boot; None if the system does not report it."""
    found = _stat(pid)
    return None if found is None else int(found[19])  # field 22 of proc(5)


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of ``/proc/<pid>/stat`` from the third (the state) on; None if the system has none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    fields = after_name.split()
    return fields if len(fields) > 19 else None


def boot_id() -> str:
    """Returns an id of this boot, which distinguishes processes with the same id before and after a restart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
