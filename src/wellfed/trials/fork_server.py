"""A process that prepares what trials share (imports, data, model), and forks one process for each of them.

The sweep's own process runs no user code: whatever data, model or driver do to a stem or to a trial, it is told. A stem
never touches CUDA, and runs what it prepares with one thread: neither survives a fork.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from wellfed.errors import ConfigError, WellfedError
from wellfed.forking import die_with_parent, exit_code, fork, held_signals, leave
from wellfed.record import Status
from wellfed.sweep.output import ERR, OUT, last_lines

T = TypeVar("T")
"""What a process of a trial printed, in its folder."""
_open: set[Connection] = set()
"""To the stems of this process. A stem that kept one to another would hide from it that the sweep is over."""


@dataclass(frozen=True)
class Job:
    """What one forked process has to do."""

    key: str
    folder: Path
    """There already; gets `OUT` and `ERR`."""
    task: Any = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set before the work begins."""
    cpus: frozenset[int] | None = None
    """That it may run on; None = all."""


@dataclass(frozen=True)
class Ended:
    """How the process of a job ended."""

    key: str
    code: int
    """Exit code; negative: the signal that ended it."""
    seconds: float


class StemFailed(Exception):
    """What trials share could not be prepared, or the process that holds it has died."""

    def __init__(self, problem: str, status: Status = "failed") -> None:
        super().__init__(problem)
        self.status = status
        """Of the trials that can't be started."""


class Stem(Generic[T]):
    """One such process, from here on.

    Args:
        prepare: makes what the jobs share; called once, in the stem.
        work: does a job, in a process of its own; gives its exit code.
        log: gets what ``prepare`` prints.
    """

    def __init__(self, prepare: Callable[[], T], work: Callable[[T, Any], int], log: Path) -> None:
        self._log = log
        self.connection, other = Pipe()
        """Readable when there is something to `take`."""
        _open.add(self.connection)
        parent = os.getpid()
        with held_signals() as let_through:
            self._pid = fork()
            if self._pid == 0:
                for each in _open:
                    each.close()
                _Child(other, parent, log).live(prepare, work, let_through)
        other.close()
        self._is_open = True

    def wait_ready(self, timeout_s: float) -> None:
        """Until the shared part is there.

        Raises:
            StemFailed: it could not be made, or not in time.
        """
        if not self.connection.poll(timeout_s):
            problem = (
                f"data and model were not there after {timeout_s:g} s; see {self._log}. Raise sweep.timeout_s, with "
                "sweep.retry=[timeout]."
            )
            raise StemFailed(problem, "timeout")
        problem = self._receive()
        if problem is not None:
            raise StemFailed(*problem)

    def start(self, job: Job) -> None:
        """Fork a process for a job.

        Raises:
            StemFailed: the stem is dead.
        """
        try:
            self.connection.send(job)
        except OSError as error:
            raise StemFailed(self._dead()) from error

    def kill(self, key: str) -> None:
        """End a job's process and all it has started; it is then told as ended by SIGKILL."""
        with contextlib.suppress(OSError):
            self.connection.send(key)

    def take(self) -> Ended:
        """The next job that has ended; blocks.

        Raises:
            StemFailed: the stem is dead, and with it all its jobs.
        """
        ended: Ended = self._receive()
        return ended

    def close(self) -> None:
        """End the stem and what it has started."""
        if self._is_open:
            self._is_open = False
            _open.discard(self.connection)
            self.connection.close()
            self._wait_a_little()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)  # itself if it is stuck, and what the data has started
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _wait_a_little(self) -> None:
        """It ends its jobs when it notices that its connection is closed, unless user code is at work in it."""
        limit_s = time.monotonic() + 2
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < limit_s:
                if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                    return
                time.sleep(0.005)

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise StemFailed(self._dead()) from error

    def _dead(self) -> str:
        return f"the process that holds data and model has died{_last_line(self._log)}; see {self._log}."


class _Child:
    """The stem's own side."""

    def __init__(self, connection: Connection, parent: int, log: Path) -> None:
        self._connection = connection
        self._parent = parent
        self._log = log
        self._running: dict[int, tuple[str, float]] = {}

    def live(
        self, prepare: Callable[[], T], work: Callable[[T, Any], int], let_through: Callable[[], None]
    ) -> NoReturn:
        code = 1
        try:
            os.setsid()  # the terminal's Ctrl-C is for the sweep, which then ends this
            die_with_parent(self._parent)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            let_through()
            _print_to(self._log, self._log)
            prepared = self._prepare(prepare)
            if prepared is not None:
                self._serve(lambda task: work(prepared[0], task))
            code = 0
        except BaseException:  # noqa: BLE001  into the log; the sweep sees the connection close
            traceback.print_exc()
        finally:
            for pid in self._running:
                _kill_group(pid)
            leave(code)

    def _prepare(self, prepare: Callable[[], T]) -> tuple[T] | None:
        try:
            prepared = prepare()
        except ConfigError as error:
            self._connection.send((" ".join(map(str, error.faults)), "invalid"))
            return None
        except WellfedError as error:
            self._connection.send((str(error),))
            return None
        except (Exception, SystemExit) as error:  # noqa: BLE001  user code
            traceback.print_exc()
            self._connection.send((f"{type(error).__name__}: {error}".strip(),))
            return None
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page
        self._connection.send(None)
        return (prepared,)

    def _serve(self, work: Callable[[Any], int]) -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # without a handler nothing is written to the pipe
        signal.set_wakeup_fd(writing)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(reading, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if reading in ready:
                    os.read(reading, 4096)
                    self._reap()
                if self._connection in ready:
                    try:
                        asked = self._connection.recv()
                    except (EOFError, OSError):  # the sweep is over
                        return
                    if isinstance(asked, Job):
                        self._fork(asked, work)
                    else:
                        self._kill(asked)

    def _fork(self, job: Job, work: Callable[[Any], int]) -> None:
        stem, began_s = os.getpid(), time.monotonic()
        pid = fork()
        if pid == 0:
            _do(job, work, stem, self._connection)
        with contextlib.suppress(OSError):  # both set it: whoever is first
            os.setpgid(pid, pid)
        self._running[pid] = (job.key, began_s)

    def _kill(self, key: str) -> None:
        for pid, (running, _) in self._running.items():
            if running == key:
                _kill_group(pid)

    def _reap(self) -> None:
        for pid in list(self._running):  # not any child: user code may have started some of its own
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                continue
            _kill_group(pid)  # what it has left behind, loader workers above all; its number is not free yet
            _, status = os.waitpid(pid, 0)
            key, began_s = self._running.pop(pid)
            self._connection.send(Ended(key, os.waitstatus_to_exitcode(status), time.monotonic() - began_s))


def _do(job: Job, work: Callable[[Any], int], stem: int, connection: Connection) -> NoReturn:
    """A job's whole process."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(stem)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.close()
        _print_to(job.folder / OUT, job.folder / ERR)
        os.environ.update(job.environment)
        if job.cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, job.cpus)
        code = work(job.task)
    except SystemExit as ended:
        code = exit_code(ended)
    except BaseException:  # noqa: BLE001  into stderr.txt
        traceback.print_exc()
    finally:
        leave(code)


def _print_to(out: Path, err: Path) -> None:
    """Standard output and error of this process, and of what it starts, go to files."""
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    # What the parent has replaced (a test's capture) would go elsewhere.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False, errors="backslashreplace")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may not lead its group yet
        os.kill(pid, signal.SIGKILL)


def _last_line(log: Path) -> str:
    lines = last_lines(log, 1)
    return f" ({lines[0]})" if lines else ""
