"""Forks a process for each trial from one that has made what trials share: imports, data, model.

    study --- Job --> fork server --- fork --> process of a job
          <- JobEnd -             <- answers -
          <--------------- Said --------------
          --------------- reply ------------->

The study's own process runs no user code. It is told about everything that data, model or driver do to a server or to
a job. A server never touches CUDA and has one thread, since neither survives a fork.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from wellfed.errors import ConfigError, WellfedError
from wellfed.masking import MaskedStream
from wellfed.process import die_with_parent, end_by_signals, exit_code, fork, held_signals, leave
from wellfed.record import Status
from wellfed.study.trial_end import ERR, OUT, last_lines

Work = Callable[..., "int | Iterator[object]"]
"""Does a task with the prepared objects. Returns an exit code, or yields answers. For a `Job` that asks, the third
argument is a function that sends a message to the study and returns its reply."""


@dataclass(frozen=True)
class Job:
    """Task of one forked process."""

    key: str
    folder: Path
    """Existing folder for `OUT` and `ERR`."""
    task: Any = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set before the work begins."""
    cpus: frozenset[int] | None = None
    """CPUs that it may run on; None = all."""
    asks: bool = False
    """Its work sends messages to the study and waits for replies."""


@dataclass(frozen=True)
class Said:
    """Message of a job that asks. The job waits until `ForkServer.reply`."""

    key: str
    what: Any


@dataclass(frozen=True)
class _Reply:
    key: str
    what: Any


@dataclass(frozen=True)
class JobEnd:
    """How the process of a job ended."""

    key: str
    code: int
    """Exit code; negative: the signal that ended it."""
    seconds: float
    answers: tuple[Any, ...] = ()
    """Answers that its work yielded."""


class ForkServerFailed(Exception):
    """Raised when data and model could not be made, or the process that holds them has died."""

    def __init__(self, problem: str, status: Status = "failed") -> None:
        super().__init__(problem)
        self.status = status
        """Status of the trials that can't be started."""


class ForkServer:
    """Process that calls ``prepare`` once, and ``work`` for each job in a forked process.

    Args:
        prepare: makes the objects that jobs share.
        work: does the task of a job.
        log: gets everything that ``prepare`` prints.
        siblings: other servers. This one closes its copies of their connections; else they would not notice the end of
            the study.
    """

    def __init__(self, prepare: Callable[[], Any], work: Work, log: Path, siblings: Iterable[ForkServer] = ()) -> None:
        self._log = log
        self.connection, other = Pipe()
        """Connection that is readable when `take` has something to return."""
        parent, self._began_s, self._is_ready = os.getpid(), time.monotonic(), False
        with held_signals() as let_through:
            self._pid = fork()
            if self._pid == 0:
                for each in (self, *siblings):
                    each.connection.close()
                _ServerProcess(other, work).live(parent, prepare, log, let_through)
        other.close()

    def is_ready(self, timeout_s: float, way_out: str = "") -> bool:
        """Returns whether the shared objects are made; does not wait.

        Args:
            timeout_s: time limit since the server was started.
            way_out: advice at the end of the message if the limit is over.

        Raises:
            ForkServerFailed: they could not be made, or not in time.
        """
        if self._is_ready:
            return True
        if self.connection.poll():
            failed: ForkServerFailed | None = self._receive()
            if failed is not None:
                raise failed
            self._is_ready = True
        elif time.monotonic() - self._began_s >= timeout_s:
            raise ForkServerFailed(
                f"data and model were not there after {timeout_s:g} s; see {self._log}. {way_out}".rstrip(),
                "timeout",
            )
        return self._is_ready

    def wait_ready(self, timeout_s: float, way_out: str = "") -> None:
        """Waits until `is_ready`, and raises as it does."""
        while not self.is_ready(timeout_s, way_out):
            self.connection.poll(max(0.0, self._began_s + timeout_s - time.monotonic()))

    def start(self, job: Job) -> None:
        """Forks a process for a job.

        Raises:
            ForkServerFailed: the server is dead.
        """
        try:
            self.connection.send(job)
        except OSError as error:
            raise self._dead() from error

    def kill(self, key: str) -> None:
        """Ends a job's process and all that it has started. `take` then returns its end by SIGKILL."""
        with contextlib.suppress(OSError):
            self.connection.send(key)

    def reply(self, key: str, what: Any) -> None:
        """Replies to the message of a job."""
        with contextlib.suppress(OSError):
            self.connection.send(_Reply(key, what))

    def take(self) -> JobEnd | Said:
        """Returns the next end or message of a job; blocks.

        Raises:
            ForkServerFailed: the server is dead, and all its jobs are.
        """
        end: JobEnd | Said = self._receive()
        return end

    def ask(self, job: Job, timeout_s: float) -> tuple[Any, ...]:
        """Runs a job that does not ask and returns its answers, fewer if it dies or takes longer than ``timeout_s``.

        No other job may run in this server.

        Raises:
            ForkServerFailed: the server is dead.
        """
        self.start(job)
        if not self.connection.poll(timeout_s):
            self.kill(job.key)
        end = self.take()
        assert isinstance(end, JobEnd)
        return end.answers

    def close(self) -> None:
        """Ends the server and all that it has started."""
        if self.connection.closed:
            return
        self.connection.close()
        limit_s = time.monotonic() + 2
        with contextlib.suppress(ChildProcessError):
            # It notices the closed connection and ends its jobs, unless user code keeps it busy.
            while not _has_ended(self._pid) and time.monotonic() <= limit_s:
                time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)  # a busy server, and processes that the data has started
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


def _has_ended(pid: int) -> bool:
    """Returns whether a child process has ended. Its id stays reserved until it is waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


@dataclass
class _RunningJob:
    key: str
    began_s: float
    connection: Connection
    pass_on: Callable[[Said], None] | None
    """Passes a message of the job on; None = its messages are answers, which are sent with its end."""
    answers: list[Any] = field(default_factory=list)

    def receive(self) -> bool:
        """Receives the messages that have come. Returns False if no more can come."""
        try:
            while self.connection.poll():
                said = self.connection.recv()
                if self.pass_on is None:
                    self.answers.append(said)
                else:
                    self.pass_on(Said(self.key, said))
        except (EOFError, OSError):
            return False
        return True


class _ServerProcess:
    """Code that runs in the server's process."""

    def __init__(self, connection: Connection, work: Work) -> None:
        self._connection, self._work = connection, work
        self._running: dict[int, _RunningJob] = {}
        """Process id -> its job."""

    def live(self, parent: int, prepare: Callable[[], Any], log: Path, let_through: Callable[[], None]) -> NoReturn:
        """Prepares, then serves until the study is over."""
        code = 1
        try:
            os.setsid()  # the terminal's Ctrl-C goes to the study, which then ends this
            die_with_parent(parent)
            end_by_signals()
            let_through()
            _print_to(log, log)
            failed = None
            try:
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
            self._connection.send(failed)
            if failed is None:
                self._serve(prepared)
            code = 0
        except BaseException:  # noqa: BLE001  into the log; the study sees the connection close
            traceback.print_exc()
        finally:
            for pid in self._running:
                _kill_group(pid)
            leave(code)

    def _serve(self, prepared: Any) -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # without a handler nothing is written to the pipe
        signal.set_wakeup_fd(writing)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(reading, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj: key.data for key, _ in selector.select()}
                for connection, job in ready.items():
                    if job is not None and not job.receive():
                        selector.unregister(connection)
                if reading in ready:
                    os.read(reading, 4096)
                    self._reap(selector)
                if self._connection in ready:
                    try:
                        asked = self._connection.recv()
                    except (EOFError, OSError):  # the study is over
                        return
                    if isinstance(asked, Job):
                        self._fork(asked, prepared, selector)
                    elif isinstance(asked, _Reply):
                        for job in [job for job in self._running.values() if job.key == asked.key]:
                            with contextlib.suppress(OSError):  # it has died meanwhile
                                job.connection.send(asked.what)
                    else:
                        for pid in [pid for pid, job in self._running.items() if job.key == asked]:
                            _kill_group(pid)

    def _fork(self, job: Job, prepared: Any, selector: selectors.BaseSelector) -> None:
        server, began_s = os.getpid(), time.monotonic()
        own, other = Pipe(duplex=job.asks)
        pid = fork()
        if pid == 0:
            self._connection.close()
            own.close()
            _do(job, lambda *task: self._work(prepared, *task), server, other)
        other.close()
        with contextlib.suppress(OSError):  # parent and child both set it, whichever is first
            os.setpgid(pid, pid)
        self._running[pid] = running = _RunningJob(job.key, began_s, own, self._connection.send if job.asks else None)
        selector.register(own, selectors.EVENT_READ, running)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        for pid in list(self._running):  # not any child: user code may have started some of its own
            if not _has_ended(pid):
                continue
            _kill_group(pid)  # processes that it has left, mostly loader workers
            _, status = os.waitpid(pid, 0)
            job = self._running.pop(pid)
            job.receive()
            if job.connection in selector.get_map():
                selector.unregister(job.connection)
            job.connection.close()
            seconds, code = time.monotonic() - job.began_s, os.waitstatus_to_exitcode(status)
            self._connection.send(JobEnd(job.key, code, seconds, tuple(job.answers)))


def _do(job: Job, work: Callable[..., int | Iterator[object]], server: int, study: Connection) -> NoReturn:
    """Runs a job in its forked process."""

    def ask(what: Any) -> Any:
        study.send(what)
        return study.recv()

    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _print_to(job.folder / OUT, job.folder / ERR)
        os.environ.update(job.environment)
        if job.cpus is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, job.cpus)
        done = work(job.task, ask) if job.asks else work(job.task)
        if isinstance(done, Iterator):
            for answer in done:
                study.send(answer)
        code = 0 if isinstance(done, Iterator) else done
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


def _kill_group(pid: int) -> None:
    for end in (os.killpg, os.kill):  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)
