"""Who builds the batches: the training process itself, threads, or processes (`processes`). Order is the caller's.

A backend is given the requests of the coming batches and yields their batches in that order, building up to
``num_workers * prefetch_factor`` of them ahead.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from wellfed.errors import DataError
from wellfed.loading.bisect import Innocent, culprits
from wellfed.loading.builder import BatchBuilder
from wellfed.loading.limits import one_thread_here
from wellfed.loading.notes import Doing, Notes
from wellfed.loading.requests import Built, Lost, Request

_LOG = logging.getLogger(__name__)
Trouble = TypeVar("Trouble")
BackendName = Literal["torch", "inline", "threads", "processes"]
_STOP_S = 2.0
"""Longest wait for producers that have been told to stop."""


@dataclass(frozen=True)
class LoaderPlan:
    """How batches are built; every field is decided."""

    backend: BackendName = "inline"
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout_s: float = 0
    worker_threads: int | None = None
    """Threads of torch and numpy in each worker process; None = 1. A producer thread always has itself alone."""


def inline(builder: BatchBuilder, requests: Iterable[Request], plan: LoaderPlan) -> Generator[Built]:
    """Each batch is built when it is asked for."""
    for request in requests:
        built = builder(request)
        yield built.pin_memory() if plan.pin_memory else built


class Answer:
    """What one request will give; cheaper than a Future, which has a lock of its own."""

    __slots__ = ("_box",)

    def __init__(self) -> None:
        self._box: queue.SimpleQueue[Built | BaseException] = queue.SimpleQueue()

    def give(self, built: Built | BaseException) -> None:
        """It is there."""
        self._box.put(built)

    def wait(self, timeout_s: float) -> Built:
        """The batch; 0 waits for ever.

        Raises:
            queue.Empty: it did not come in time.
            BaseException: what building it raised.
        """
        built = self._box.get(timeout=timeout_s or None)
        if isinstance(built, BaseException):
            raise built
        return built


Jobs = queue.SimpleQueue[tuple[Request, Answer] | None]


def threads(builder: BatchBuilder, requests: Iterable[Request], plan: LoaderPlan) -> Generator[Built]:
    """Threads build ahead; for data whose ``fetch`` spends its time in torch or IO, which release the GIL."""
    ahead: deque[tuple[Request, Answer]] = deque()
    most_ahead = plan.num_workers * (plan.prefetch_factor or 2)
    producers = _Producers(builder, plan)
    try:
        for request in requests:
            ahead.append((request, producers.submit(request)))
            if len(ahead) >= most_ahead:
                yield producers.result(*ahead.popleft())
        while ahead:
            yield producers.result(*ahead.popleft())
    finally:
        producers.stop()


class _Producer:
    """A thread that builds what is in a queue. It may be left behind: Python waits at its exit for the threads of a
    ThreadPoolExecutor, also for a stuck one."""

    def __init__(self, builder: BatchBuilder, plan: LoaderPlan, jobs: Jobs) -> None:
        self._builder, self._pins, self._jobs = builder, plan.pin_memory, jobs
        self._notes = Notes(1, shared=False)
        self._is_left = False
        self.thread = threading.Thread(target=self._run, name="wellfed-loader", daemon=True)
        self.thread.start()

    def leave(self) -> None:
        """Build nothing more: it is told to stop, or stuck and replaced."""
        self._is_left = True

    def is_left(self) -> bool:
        """Whether it builds nothing more."""
        return self._is_left

    def doing(self) -> Doing | None:
        """What it is at."""
        return self._notes.doing(0)

    def _run(self) -> None:
        note = self._notes.row(0)
        with one_thread_here():
            while not self.is_left() and (job := self._jobs.get()) is not None:
                request, answer = job
                if self.is_left():
                    return
                try:
                    built = self._builder(request, note)
                    answer.give(built.pin_memory() if self._pins else built)
                except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
                    answer.give(error)


class _Producers:
    """Threads that share a queue of requests, and the way around one that hangs."""

    def __init__(self, builder: BatchBuilder, plan: LoaderPlan) -> None:
        self._builder, self._plan = builder, plan
        self._jobs: Jobs = queue.SimpleQueue()
        self._producers = [_Producer(builder, plan, self._jobs) for _ in range(plan.num_workers)]

    def submit(self, request: Request) -> Answer:
        """The batch of this request, when it is built."""
        answer = Answer()
        self._jobs.put((request, answer))
        return answer

    def result(self, request: Request, answer: Answer) -> Built:
        """The batch, with what hung on the way.

        Raises:
            DataError: it did not come in time, and no sample can be shown to be at fault.
        """
        lost: list[Lost] = []
        while True:
            try:
                built = answer.wait(self._plan.timeout_s)
                return built.with_lost(lost) if lost else built
            except queue.Empty:
                index = self._stuck_at(request)
            lost.append(Lost(index, hung(self._plan.timeout_s)))
            request = request.without(index)
            if len(lost) > self._builder.most_lost or len(request.indices) == 0:
                return Built(None, tuple(lost))
            answer = self._attempt(request)

    def stop(self) -> None:
        """Build nothing more; waits a moment for the batches in hand, so that nothing runs beside what comes next."""
        for producer in self._producers:
            producer.leave()
            self._jobs.put(None)
        until_s = time.monotonic() + _STOP_S
        for producer in self._producers:
            producer.thread.join(max(0.0, until_s - time.monotonic()))

    def _stuck_at(self, request: Request) -> int:
        """The index that a thread hangs at; that thread is left behind and another takes its place."""
        for producer in self._producers:
            doing = producer.doing()
            if doing is None or not is_stuck(doing, request, self._plan.timeout_s):
                continue
            producer.leave()
            self._producers.remove(producer)
            self._producers.append(_Producer(self._builder, self._plan, self._jobs))
            if doing.index is not None:
                return doing.index
            try:
                return search(request, True, self._hangs)
            except Innocent:
                break
        raise too_late(self._plan.timeout_s)

    def _hangs(self, part: Request) -> bool | None:
        try:
            self._attempt(part).wait(self._plan.timeout_s)
        except queue.Empty:
            return True
        except Exception:  # noqa: BLE001  told when the batch is built without the one that hangs
            return None
        return None

    def _attempt(self, request: Request) -> Answer:
        """The batch of this request, from a thread of its own."""
        jobs: Jobs = queue.SimpleQueue()
        answer = Answer()
        jobs.put((request, answer))
        jobs.put(None)
        self._producers.append(_Producer(self._builder, self._plan, jobs))
        return answer


def is_stuck(doing: Doing, request: Request, timeout_s: float) -> bool:
    """Whether a producer hangs at this request. One that began with its sample a moment ago is slow, not stuck."""
    is_here = (doing.epoch, doing.batch) == (request.epoch, request.batch)
    return is_here and doing.for_s >= timeout_s / 2


def search(request: Request, known: Trouble, trouble: Callable[[Request], Trouble | None]) -> int:
    """The first index that hangs, or kills, where the data was asked for a whole batch at once.

    Raises:
        Innocent: every sample can be had alone.
    """
    _LOG.warning(
        "Training batch %d of epoch %d never came: looking for the one of its %d samples that is at fault.",
        request.batch, request.epoch, len(request.indices),
    )  # fmt: skip
    return culprits(request.indices, known, lambda part: trouble(request.only(part)), most=1)[0][0]


def hung(timeout_s: float) -> str:
    """The reason of a sample that hangs."""
    return f"it did not come within loader.timeout_s={timeout_s:g}"


def too_late(timeout_s: float) -> DataError:
    """The error of a batch that is late without any sample hanging."""
    return DataError(
        f"No batch came within loader.timeout_s={timeout_s:g} s: a producer is stuck or too slow. "
        "Set loader.timeout_s higher (0 = wait for ever), or loader.backend=inline to see where it hangs."
    )
