"""Builds batches in torch's DataLoader worker processes, and finds a way around a sample that hangs or kills one.

Workers are told the indices of each batch with the request, so that none of them knows the order of an epoch, and write
down which sample they are at. When one dies or hangs, all are started anew and the same batch is asked for again,
without that sample.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.queues
import multiprocessing.util
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker
from threadpoolctl import ThreadpoolController
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from wellfed.data.backends.bad_samples import NoSampleAtFaultError, WorkerLost, first_failing_sample, hung, too_late
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch, LostSample
from wellfed.data.backends.heartbeats import Activity, Heartbeat, shared_heartbeats
from wellfed.data.backends.picklable import check_picklable
from wellfed.data.settings import LoaderSettings
from wellfed.errors import ENDED_WORKER, KILLED_WORKER, DataError, text_of, type_and_line
from wellfed.process import CPUS_AT_START, STOPS, die_with_parent

_LOOK_S = 0.5
"""Longest time between two looks at whether the workers live."""
_ALONE_S = 60
"""Longest that a process may take to start, and where loader.timeout_s sets no bound to load a sample alone."""
_ENDING_S = 0.2
"""Its connection is closed a moment before a process has ended."""
_BUILT = 86
"""Exit code of a process that has built its batch, or raised: the data may end theirs with 0."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass
class _Waiting:
    """A request that is not delivered yet."""

    request: BatchRequest
    lost: list[LostSample] = field(default_factory=list)
    is_given_up: bool = False
    """It has lost more than allowed, or all; not asked for again."""


@dataclass
class _NotSent:
    """Comes in place of a batch that a worker has built and could not send."""

    reason: str

    def error(self, purpose: str) -> WorkerLost:
        """For the user."""
        if _NO_ROOM.search(self.reason):
            problem = f"/dev/shm has no room for the {purpose} batch that a worker has built ({self.reason})."
            way_out = "Set loader.backend=inline loader.num_workers=0, or give a container more: --shm-size=8g."
        elif "Too many open files" in self.reason:
            problem = f"A worker had no file descriptor left for the {purpose} batch that it has built ({self.reason})."
            way_out = "Allow more open files (ulimit -n 65536), or set a smaller loader.prefetch_factor."
        else:
            problem = f"A worker could not send the {purpose} batch that it has built: {self.reason}."
            way_out = "Let the data return tensors and what pickles, or set loader.backend=inline loader.num_workers=0."
            error = WorkerLost(f"{problem} {way_out}")
            error.kind = "data"  # the machine lacks nothing
            return error
        return WorkerLost(f"{problem} {way_out}")


_NO_ROOM = re.compile(r"No space left|shared memory|write to file </torch_|resize file </torch_|Cannot allocate")


@dataclass
class _WorkerStopped(Exception):
    """A worker died or hangs."""

    activity: Activity
    reason: str
    is_hang: bool
    exit_code: int | None = None


class ProcessBackend:
    """One message a batch; workers are kept from epoch to epoch where persistent. A DataError where they would be sent
    what can't be pickled."""

    def __init__(self, builder: BatchBuilder, settings: LoaderSettings) -> None:
        self._builder, self._settings = builder, settings
        self._requests = _Requests()
        self._heartbeats = shared_heartbeats(settings.num_workers)
        self._processes: list[Any] = []
        if settings.num_workers and multiprocessing.get_start_method() != "fork":
            check_picklable(builder)
        self._loader = self._make_loader()

    def __call__(self, requests: Iterable[BatchRequest]) -> Generator[BuiltBatch]:
        """The batches of these requests, in order.

        Raises:
            DataError: a batch did not come in time, and no sample can be shown to be at fault.
            WorkerLost: a worker died, likewise.
        """
        waiting: deque[_Waiting] = deque()
        self._requests.rest, self._requests.waiting = iter(requests), waiting
        built_batches: Any = None
        while True:
            try:
                built_batches = self._start()
                while True:
                    while waiting and waiting[0].is_given_up:
                        yield BuiltBatch(None, tuple(waiting.popleft().lost))
                    built = self._next(built_batches, waiting)
                    if built is None:
                        return
                    lost = waiting.popleft().lost
                    yield built.with_lost(lost) if lost else built
            except _WorkerStopped as stopped:
                self._leave_out_sample(stopped, waiting)
            except Exception:
                # The error holds the workers as long as it lives: its traceback goes through what asked them.
                self._end_workers(built_batches)
                raise
            self._end_workers(built_batches)
            self._loader = self._make_loader()

    def _next(self, built_batches: Iterator[BuiltBatch], waiting: deque[_Waiting]) -> BuiltBatch | None:
        asked_at_s = time.monotonic()
        while True:
            try:
                built: Any = next(built_batches, None)
            except (RuntimeError, OSError, EOFError) as error:
                # Not only torch's own RuntimeError: a batch that is on its way when its worker dies can't be opened.
                if not isinstance(error, RuntimeError) or str(error).startswith("DataLoader worker"):
                    raise (self._death() or self._lost_between_samples(error)) from None
                if not str(error).startswith("DataLoader timed out"):
                    raise
            else:
                if isinstance(built, _NotSent):
                    raise built.error(self._builder.purpose)
                if built is not None and isinstance(built.batch, DataError):
                    raise built.batch
                return built  # type: ignore[no-any-return]
            if self._settings.timeout_s and time.monotonic() - asked_at_s >= self._settings.timeout_s:
                raise self._hang(waiting[0].request)

    def _end_workers(self, iterator: Any) -> None:
        """Kills the workers of a DataLoader's iterator, and leaves it nothing to end.

        Its own end sets an event that workers share. A worker that was killed while it looked at the event holds the
        event's lock, and torch would wait for it for ever.
        """
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_ENDING_S)
        if getattr(iterator, "_shutdown", True) is False:
            iterator._shutdown = True
            iterator._worker_pids_set = False
            _remove_worker_pids(id(iterator))
            if hasattr(iterator, "_pin_memory_thread_done_event"):
                iterator._pin_memory_thread_done_event.set()

    def _death(self) -> _WorkerStopped | None:
        """What a worker died at; None if it was at nothing."""
        by_pid = {process.pid: process for process in self._processes}
        for heartbeat in self._heartbeats:
            process, activity = by_pid.get(heartbeat.pid), heartbeat.activity()
            if process is None or activity is None:
                continue
            process.join(_ENDING_S)
            if not process.is_alive():
                how = _how_it_ended(process.exitcode)
                return _WorkerStopped(activity, how, is_hang=False, exit_code=process.exitcode)
        return None

    def _lost_between_samples(self, error: Exception) -> Exception:
        """For a worker that ended while it was at no sample, as it handed a batch over; else the error itself."""
        for process in self._processes:
            process.join(_ENDING_S)
            if not process.is_alive():
                how = _how_it_ended(process.exitcode).removeprefix("its worker ")
                return _lost(f"A loader worker {how} while it was at no sample", process.exitcode)
        return error

    def _hang(self, request: BatchRequest) -> Exception:
        """What the worker that has this request hangs at; it is killed."""
        timeout_s = self._settings.timeout_s
        for heartbeat in self._heartbeats if self._settings.finds_stuck_sample else ():
            if activity := heartbeat.stuck_at(request, timeout_s):
                for process in self._processes:
                    if process.pid == heartbeat.pid:
                        process.kill()
                return _WorkerStopped(activity, hung(timeout_s), is_hang=True)
        return too_late(timeout_s)

    def _leave_out_sample(self, stopped: _WorkerStopped, waiting: deque[_Waiting]) -> None:
        """Take the sample that a worker died or hung at out of its request."""
        at = (stopped.activity.epoch, stopped.activity.batch)
        place = next(one for one in waiting if (one.request.epoch, one.request.batch) == at)
        index = self._sample_at_fault(stopped, place.request)
        place.lost.append(LostSample(index, stopped.reason))
        place.request = place.request.without(index)
        place.is_given_up = len(place.lost) > self._builder.most_lost or len(place.request.indices) == 0

    def _sample_at_fault(self, stopped: _WorkerStopped, request: BatchRequest) -> int:
        index = stopped.activity.index
        if index is None and self._builder.has_fetch:
            try:
                return first_failing_sample(request, self._builder.purpose, stopped.reason, self._end_of_builder)
            except NoSampleAtFaultError:
                pass
        elif index is not None:
            # A worker may be killed for its memory, at any sample.
            alone = request.only(request.indices[request.indices == index])
            if stopped.is_hang or self._end_of_builder(alone) is not None:
                return index
        if stopped.is_hang:
            raise too_late(self._settings.timeout_s)
        at = "while it made" if index is None else f"at sample {index} of"
        raise _lost(
            f"A loader worker {stopped.reason.removeprefix('its worker ')} {at} {self._builder.purpose} batch "
            f"{request.batch} of epoch {request.epoch}, but no sample does so alone",
            stopped.exit_code,
        )

    def _end_of_builder(self, request: BatchRequest) -> str | None:
        """How a process of its own dies or hangs when it builds this; None = it does neither, or raises.

        None too where it takes long and no timeout was asked for, or where it does not come to start.
        """
        (heartbeat,) = heartbeats = shared_heartbeats(1)
        told = self._builder, request, heartbeat, self._init_of(heartbeats), os.getpid()
        process = multiprocessing.Process(target=_build_one, args=told, daemon=True)
        process.start()
        started_s, timeout_s = time.monotonic(), self._settings.timeout_s
        while process.is_alive():
            activity = heartbeat.activity()
            if activity is None:
                is_late, reason = time.monotonic() - started_s >= max(timeout_s, _ALONE_S), None
            else:
                is_late, reason = activity.for_s >= (timeout_s or _ALONE_S), hung(timeout_s) if timeout_s else None
            if is_late:
                process.kill()
                process.join()
                return reason
            process.join(0.01)
        return None if process.exitcode == _BUILT else _how_it_ended(process.exitcode)

    def _start(self) -> Iterator[BuiltBatch]:
        before = {process.pid for process in multiprocessing.active_children()}
        with _undisturbed():
            try:
                iterator = iter(self._loader)
            except RuntimeError as error:
                # Persistent workers that are still at batches of a pass that was given up.
                if not str(error).startswith(("DataLoader timed out", "DataLoader worker")):
                    raise
                self._loader = self._make_loader()
                iterator = iter(self._loader)
        started = [process for process in multiprocessing.active_children() if process.pid not in before]
        self._processes = started or self._processes
        return iterator

    def _make_loader(self) -> DataLoader[BuiltBatch]:
        for heartbeat in self._heartbeats:
            heartbeat.clear()
        settings = self._settings
        options: dict[str, Any] = {}
        if settings.num_workers:
            options = {
                "prefetch_factor": settings.prefetch_factor,
                "persistent_workers": settings.persistent_workers,
                "worker_init_fn": self._init_of(self._heartbeats),
                "timeout": min(_LOOK_S, settings.timeout_s or _LOOK_S),
            }
        dataset: Dataset[BuiltBatch] = _InWorker(self._builder, self._heartbeats)
        with _undisturbed():
            multiprocessing.util.get_temp_dir()  # one for all workers: a killed worker would leave its own
            return DataLoader(
                dataset,
                sampler=self._requests,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=settings.num_workers,
                pin_memory=settings.pin_memory,
                # For its workers' seeds. Without one of its own it draws from the process's, and so changes dropout.
                generator=torch.Generator().manual_seed(self._builder.seed),
                **options,
            )

    def _init_of(self, heartbeats: Sequence[Heartbeat]) -> Callable[[int], None]:
        return partial(_init_worker, self._builder, heartbeats, CPUS_AT_START, self._settings.worker_threads or 1)


class _Requests(Sampler[BatchRequest]):
    """What was asked for before and never came, and on: lets one DataLoader, and so its live workers, serve any stretch
    of any epoch."""

    def __init__(self) -> None:
        self.rest: Iterator[BatchRequest] = iter(())
        self.waiting: deque[_Waiting] = deque()

    def __iter__(self) -> Iterator[BatchRequest]:
        rest, waiting = self.rest, self.waiting
        yield from [one.request for one in waiting if not one.is_given_up]
        for request in rest:
            waiting.append(_Waiting(request))
            yield request


class _InWorker(Dataset[BuiltBatch]):
    """The builder as DataLoader asks it."""

    def __init__(self, builder: BatchBuilder, heartbeats: Sequence[Heartbeat]) -> None:
        self._builder, self._heartbeats = builder, heartbeats

    def __getitem__(self, request: BatchRequest) -> BuiltBatch:
        worker = get_worker_info()
        if worker is None:
            return self._builder(request)
        try:
            built = self._builder(request, self._heartbeats[worker.id])
        except DataError as error:  # which DataLoader would wrap in its traceback
            return BuiltBatch(error)
        for one in built.lost:
            one.cause = _portable(one.cause)
        return built


def _init_worker(
    builder: BatchBuilder,
    heartbeats: Sequence[Heartbeat],
    cpus_given: frozenset[int] | None,
    num_threads: int,
    worker: int,
) -> None:
    """What a worker process does first; its number is that of its heartbeat."""
    # A forked worker has the training process's handlers, which ask for an end after the step. It is the training
    # process that tells workers when to end, and at last terminates them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in set(STOPS) - {signal.SIGINT, signal.SIGTERM}:  # a terminal that is gone sends to all its processes
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # a collection would write to all that a forked worker shares, and so copy it
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(num_threads)))  # for libraries that are loaded later
    if cpus_given is not None:
        try:
            threads = [int(name) for name in os.listdir("/proc/self/task")]
        except OSError:
            threads = [0]
        for thread in threads:
            os.sched_setaffinity(thread, cpus_given)
    ThreadpoolController().limit(limits=num_threads)  # in the BLAS that numpy uses
    torch.set_num_threads(num_threads)
    heartbeats[worker].sign()
    # Called by the thread that sends what a worker has built. By default it prints the error and forgets the batch.
    multiprocessing.queues.Queue._on_queue_feeder_error = _tell_of_unsent  # type: ignore[attr-defined]
    if builder.worker_init is not None:
        if (info := get_worker_info()) is not None:
            torch_worker._worker_info = replace(info, dataset=builder.dataset)  # of the user's: it is looked for there
        builder.worker_init(worker)


def _build_one(
    builder: BatchBuilder, request: BatchRequest, heartbeat: Heartbeat, init: Callable[[int], None], parent: int
) -> None:
    if multiprocessing.get_start_method() != "forkserver":  # whose children are the server's
        die_with_parent(parent)
    init(0)
    with suppress(Exception):  # told when the batch is built without the sample that kills
        builder(request, heartbeat)
    sys.exit(_BUILT)


def _as_it_is(built: Any) -> Any:
    return built


def _portable(error: BaseException | None) -> BaseException | None:
    """An exception that reaches the training process, with the worker's traceback as a note."""
    if error is None:
        return None
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        copy: object = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever a user's exception does when it is pickled
        copy = None
    own = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    portable = copy if isinstance(copy, BaseException) else own  # a __reduce__ may make anything of an error
    portable.add_note(f"In the worker process:\n{text}")
    return portable


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its worker process ended by itself with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"its worker process was killed by {names.get(-code, f'signal {-code}')}"


def _lost(how: str, code: int | None) -> WorkerLost:
    """Returns the error of a worker that ended with this exit code: by a signal, or by what it ran."""
    is_by_itself = code is not None and code >= 0
    error = WorkerLost(f"{how}: {ENDED_WORKER if is_by_itself else KILLED_WORKER}")
    if is_by_itself:
        error.kind = "data"
    return error


def _tell_of_unsent(results: Any, error: Exception, sent: Any) -> None:
    """Sends word in place of a batch that could not be sent: the training process would wait for it for ever."""
    number, _ = sent
    results.put((number, _NotSent(type_and_line(error))))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps DataLoader from warning of more workers than CPUs, which the plan has done with the number that would suit,
    and from telling a worker's death wherever the training process happens to be.

    It installs a handler that raises in the midst of a step. Without it, a death is noticed where the batch is asked
    for, which is where it can be mended.
    """
    has_signal = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if has_signal else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield
    if before is not None:
        signal.signal(signal.SIGCHLD, before)
