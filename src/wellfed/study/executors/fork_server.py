"""Forks a process for each trial from one that has made what trials share: imports, data, model.

    study --- Job, Said ---> fork server --- fork ---> process of a job
          <----- Said -----               <--- any --->

The study's own process runs no user code. It is told about everything that data, model or driver do to a server or to
a job. A server never touches CUDA and has one thread, since neither survives a fork.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

from wellfed.errors import ConfigError, WellfedError
from wellfed.masking import MaskedStream
from wellfed.process import die_with_parent, end_by_signals, exit_code, fork, held_signals, leave
from wellfed.record.entries import Status
from wellfed.study.trial_end import ERR, OUT, TrialEnd, last_lines

_LOOK_S = 0.5
"""Seconds between checks for jobs at their time limit, and for ended ones whose connection another process holds."""
_IMPORTS_S = 600.0
"""Seconds that imports may take, as on a slow shared disk."""
_own: set[Connection] = set()
"""Connections of this process alone. Each process that it forks closes its copies, so that an end is noticed."""


def _close_copies() -> None:
    for connection in _own:
        connection.close()
    _own.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)


@dataclass(frozen=True)
class Job:
    """Task of one forked process."""

    key: str
    folder: Path
    """Existing folder for `OUT` and `ERR`."""
    task: Callable[[Any, Connection], int]
    """Gets the prepared objects and the connection to the study, and returns the exit code. It can be pickled."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set before the task begins."""
    cpus: frozenset[int] | None = None
    """CPUs that it may run on; None = all."""
    limit_s: float = math.inf
    """Time limit, after which it is killed with all that it has started."""


@dataclass(frozen=True)
class Said:
    """Message from a job to the study, or back."""

    key: str
    what: Any
    """A `TrialEnd` is the last from a job."""


class ForkServerFailed(Exception):
    """Raised when data and model could not be made, or the process that holds them has died."""

    def __init__(self, problem: str, status: Status = "failed") -> None:
        super().__init__(problem)
        self.status = status
        """Status of the trials that can't be started."""


class ForkServer:
    """Process that calls ``imports`` and ``prepare`` once, and does the task of each job in a forked process.

    Args:
        prepare: makes the objects that jobs share.
        log: gets everything that ``imports`` and ``prepare`` print.
        limit_s: time limit of preparing, without the imports.
        way_out: advice at the end of the message if that is over.
        imports: imports what ``prepare`` and the jobs need. The parent need not import it.
    """

    def __init__(
        self,
        prepare: Callable[[], Any],
        log: Path,
        limit_s: float,
        way_out: str = "",
        imports: Callable[[], object] = lambda: None,
    ) -> None:
        self._log, self._limit_s, self._way_out = log, limit_s, way_out
        self.connection, other = Pipe()
        """Connection that is readable when `is_ready` or `take` has something to return."""
        _own.add(self.connection)
        parent, self._end_s = os.getpid(), time.monotonic() + _IMPORTS_S
        self._has_imported = self._is_ready = False
        with held_signals() as let_through:
            self._pid = fork()
            if self._pid == 0:
                _ServerProcess(other).live(parent, imports, prepare, log, let_through)
        other.close()

    def is_ready(self) -> bool:
        """Returns whether the shared objects are made; does not wait.

        Raises:
            ForkServerFailed: they could not be made, or not in time.
        """
        while not self._is_ready and self.connection.poll():
            failed: ForkServerFailed | None = self._receive()
            if failed is not None:
                raise failed
            self._is_ready, self._has_imported = self._has_imported, True
            self._end_s = time.monotonic() + self._limit_s
        if not self._is_ready and time.monotonic() >= self._end_s:
            problem = f"PyTorch was not imported after {_IMPORTS_S:g} s; see {self._log}. Is the disk slow?"
            if self._has_imported:
                problem = f"data and model were not there after {self._limit_s:g} s; see {self._log}. {self._way_out}"
            raise ForkServerFailed(problem.rstrip(), "timeout")
        return self._is_ready

    def wait_ready(self) -> None:
        """Waits until `is_ready`, and raises as it does."""
        while not self.is_ready():
            self.connection.poll(min(_IMPORTS_S, max(0.0, self._end_s - time.monotonic())))

    def send(self, what: Job | Said) -> None:
        """Forks a process for a job, or passes a message on to one.

        Raises:
            ForkServerFailed: the server is dead.
        """
        try:
            self.connection.send(what)
        except OSError as error:
            raise self._dead() from error

    def take(self) -> Said:
        """Returns the next message of a job; blocks.

        Raises:
            ForkServerFailed: the server is dead, and all its jobs are.
        """
        told: Said = self._receive()
        return told

    def ask(self, job: Job) -> list[Any]:
        """Runs a job and returns its messages. No other job may run in this server.

        Raises:
            ForkServerFailed: the server is dead.
        """
        self.send(job)
        answers = []
        while not isinstance(what := self.take().what, TrialEnd):
            answers.append(what)
        return answers

    def close(self) -> None:
        """Ends the server and all that it has started."""
        if self.connection.closed:
            return
        _own.discard(self.connection)
        self.connection.close()
        limit_s = time.monotonic() + 2
        with contextlib.suppress(ChildProcessError):
            # It notices the closed connection and ends its jobs, unless user code keeps it busy.
            while not _has_ended(self._pid, os.WNOHANG) and time.monotonic() <= limit_s:
                time.sleep(0.005)
        _kill_group(self._pid)  # a busy server, and processes that the data has started
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise self._dead() from error

    def _dead(self) -> ForkServerFailed:
        lines = last_lines(self._log, 1)
        said = f" ({lines[0]})" if lines else ""
        return ForkServerFailed(f"the process that holds data and model has died{said}; see {self._log}.")


def _has_ended(pid: int, how: int) -> bool:
    """Returns whether a child process has ended. Its id stays reserved until it is waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | how) is not None


def _kill_group(pid: int) -> None:
    for end in (os.killpg, os.kill):  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


@dataclass
class _RunningJob:
    key: str
    pid: int
    began_s: float
    end_s: float
    is_late: bool = False


class _ServerProcess:
    """Code that runs in the server's process."""

    def __init__(self, study: Connection) -> None:
        _own.add(study)
        self._study = study
        self._running: dict[Connection, _RunningJob] = {}

    def live(
        self,
        parent: int,
        imports: Callable[[], object],
        prepare: Callable[[], Any],
        log: Path,
        let_through: Callable[[], None],
    ) -> NoReturn:
        """Imports, prepares, then serves until the study is over."""
        code = 1
        try:
            os.setsid()  # the terminal's Ctrl-C goes to the study, which then ends this
            die_with_parent(parent)
            end_by_signals()
            let_through()
            _print_to(log, log)
            failed = prepared = None
            try:
                imports()
                with contextlib.suppress(ConnectionError):  # the study is over, which is noticed below
                    self._study.send(None)
                prepared = prepare()
            except ConfigError as error:
                failed = ForkServerFailed(" ".join(map(str, error.faults)), "invalid")
            except WellfedError as error:
                failed = ForkServerFailed(str(error))
            except (Exception, SystemExit) as error:  # noqa: BLE001  user code
                traceback.print_exc()
                failed = ForkServerFailed(f"{type(error).__name__}: {error}".strip())
            gc.collect()
            gc.freeze()  # a collection in a child would copy every page
            self._study.send(failed)
            while failed is None:
                self._serve(prepared)
        except (EOFError, ConnectionError):  # the study is over
            code = 0
        except BaseException:  # noqa: BLE001  into the log; the study sees the connection close
            traceback.print_exc()
        finally:
            for job in self._running.values():
                _kill_group(job.pid)
            for job in self._running.values():  # none is left when the study goes on
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(job.pid, 0)
            leave(code)

    def _serve(self, prepared: Any) -> None:
        """Passes on what has come, ends jobs at their time limit, and reports those that have ended."""
        for ready in wait([self._study, *self._running], _LOOK_S):
            assert isinstance(ready, Connection)
            if ready is not self._study:
                self._pass_on(ready)
            elif isinstance(asked := ready.recv(), Job):
                self._fork(asked, prepared)
            else:
                for connection in [each for each, job in self._running.items() if job.key == asked.key]:
                    with contextlib.suppress(OSError):  # it has died meanwhile
                        connection.send(asked.what)
        for connection, job in list(self._running.items()):
            if _has_ended(job.pid, os.WNOHANG):
                self._end(connection)
            elif time.monotonic() >= job.end_s and not job.is_late:
                job.is_late = True
                _kill_group(job.pid)

    def _fork(self, job: Job, prepared: Any) -> None:
        server, began_s = os.getpid(), time.monotonic()
        own, other = Pipe()
        _own.add(own)
        pid = fork()
        if pid == 0:
            _own.add(other)
            _run(job, prepared, server, other)
        other.close()
        with contextlib.suppress(OSError):  # parent and child both set it, whichever is first
            os.setpgid(pid, pid)
        self._running[own] = _RunningJob(job.key, pid, began_s, began_s + job.limit_s)

    def _pass_on(self, connection: Connection) -> None:
        """Passes on one message of a job, or its end."""
        try:
            what = connection.recv()
        except (EOFError, OSError):
            _has_ended(self._running[connection].pid, 0)  # waits: its connection closes just before its end
            self._end(connection)
        else:
            self._study.send(Said(self._running[connection].key, what))

    def _end(self, connection: Connection) -> None:
        job = self._running[connection]
        _kill_group(job.pid)  # processes that it has left, mostly loader workers
        with contextlib.suppress(EOFError, OSError):
            while connection.poll():
                self._study.send(Said(job.key, connection.recv()))
        _own.discard(connection)
        connection.close()
        del self._running[connection]
        code = os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])
        is_timeout = job.is_late and code == -signal.SIGKILL  # else it has ended just then
        self._study.send(Said(job.key, TrialEnd(code, time.monotonic() - job.began_s, is_timeout)))


def _run(job: Job, prepared: Any, server: int, study: Connection) -> NoReturn:
    """Runs a job in its forked process."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(server)
        _print_to(job.folder / OUT, job.folder / ERR)
        os.environ.update(job.environment)
        if job.cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, job.cpus)
        code = job.task(prepared, study)
    except SystemExit as ended:
        code = exit_code(ended)
    except BaseException:  # noqa: BLE001  into stderr.txt
        traceback.print_exc()
    finally:
        leave(code)


def _print_to(out: Path, err: Path) -> None:
    """Redirects standard output and error of this process and its children to files."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, append), (2, err, append)):
        descriptor = os.open(path, flags, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The parent may have replaced these objects, as a test's capture does.
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.fdopen(number, "wb", closefd=False)
        setattr(sys, name, MaskedStream(file, encoding="utf-8", errors="backslashreplace", line_buffering=True))
