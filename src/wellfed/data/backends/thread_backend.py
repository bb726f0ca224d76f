"""Builds batches in threads, for data whose ``fetch`` spends its time in torch or IO, which release Python's lock.

A cheap batch is built in less time than it takes to change threads, so neither side wakes the other for each: a worker
is given several batches at a time, a chunk, where these are soon built, and tells when it is through.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice

import torch
from threadpoolctl import ThreadpoolController

from wellfed.data.backends.bad_samples import NoSampleAtFaultError, first_failing_sample, hung, too_late
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch, LostSample
from wellfed.data.backends.heartbeats import Heartbeat
from wellfed.data.settings import LoaderSettings

_SOON_S = 0.001
"""Workers are given more at a time as long as they are through with it in less: hardly a step is shorter."""
_STOP_S = 2.0
"""Longest wait for workers that have been told to stop."""


def built_by_threads(
    builder: BatchBuilder, requests: Iterable[BatchRequest], settings: LoaderSettings, num_requests: int
) -> Generator[BuiltBatch]:
    """The batches of the requests in order. ``requests`` is read by the workers, one at a time.

    Raises:
        DataError: a batch did not come in time, and no sample can be shown to be at fault.
    """
    chunks, ahead, length = _ChunkQueue(requests), deque[_Chunk](), 1
    prefetch = min(settings.prefetch_factor or 2, max(1, num_requests))
    room = min(settings.num_workers * prefetch + 1, max(1, num_requests))  # one is in the hands of the step
    workers = _Workers(builder, settings, chunks)
    try:
        while True:
            while room >= length:
                ahead.append(chunks.add(length))
                room -= length
            chunk = ahead.popleft()
            yield from workers.results(chunk)
            if len(chunk.requests) < chunk.length:
                return
            room += chunk.length
            length = 2 * length if chunk.took_s < _SOON_S else length // 2
            length = max(1, min(length, prefetch // 2))  # while one half is used up, the other is built
    finally:
        workers.stop()


class _Late(Exception):
    """A batch did not come in time. Not queue.Empty, which the data itself may raise."""


class _Chunk:
    """Successive batches that one worker builds in a row."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.requests: Sequence[BatchRequest] = ()
        """Once a worker has come to it; fewer than ``length`` where the epoch ends."""
        self.num_taken = 0
        self.took_s = 0.0
        """Time to build them all, once they are."""
        self._given: deque[BuiltBatch | BaseException | None] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def give(self, built: BuiltBatch | BaseException | None, *, wakes: bool) -> None:
        """The next, or None behind the last; ``wakes`` who waits for it."""
        self._given.append(built)
        if wakes:
            self._news.put(None)

    def take(self, timeout_s: float) -> BuiltBatch | None:
        """The next batch, waited for; None behind the last. Raises what building it raised, or `_Late`; 0 waits for
        ever."""
        while not self._given:
            try:
                self._news.get(timeout=timeout_s or None)
            except queue.Empty:
                if not self._given:
                    raise _Late from None
        built = self._given.popleft()
        if isinstance(built, BaseException):
            raise built
        self.num_taken += 1
        return built


class _ChunkQueue:
    """Deals the requests to workers in chunks.

    The workers make the requests too: in the training thread that would cost a step as much as all else it does for
    its batch.
    """

    def __init__(self, requests: Iterable[BatchRequest]) -> None:
        self._requests = iter(requests)
        self._wanted: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._turn = threading.Lock()

    def add(self, length: int) -> _Chunk:
        """So many more are to be built."""
        chunk = _Chunk(length)
        self._wanted.put(chunk)
        return chunk

    def end(self) -> None:
        """One worker may end."""
        self._wanted.put(None)

    def take(self) -> _Chunk | None:
        """The next chunk, waited for, with its requests; None = no more."""
        with self._turn:  # also while it waits: chunks get their requests in the order in which they are wanted
            chunk = self._wanted.get()
            if chunk is not None:
                try:
                    chunk.requests = list(islice(self._requests, chunk.length))
                except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
                    chunk.give(error, wakes=True)
        return chunk


class _Worker:
    """A thread that builds what it is dealt. It may be left behind: Python waits at its exit for the threads of a
    ThreadPoolExecutor, also for a stuck one."""

    def __init__(self, builder: BatchBuilder, settings: LoaderSettings, chunks: _ChunkQueue) -> None:
        self._builder, self._pins, self._chunks = builder, settings.pin_memory, chunks
        self.heartbeat = Heartbeat()
        self.is_left = False
        """It builds nothing more: it is told to stop, or stuck and replaced."""
        self.thread = threading.Thread(target=self._run, name="wellfed-loader", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with _one_thread_here():
            while not self.is_left and (chunk := self._chunks.take()) is not None:
                self._build(chunk)

    def _build(self, chunk: _Chunk) -> None:
        began_s = time.perf_counter()
        for request in chunk.requests:
            if self.is_left:
                return
            built: BuiltBatch | BaseException
            try:
                built = self._builder(request, self.heartbeat)
                built = built.pin_memory() if self._pins else built
            except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
                built = error
            chunk.took_s = time.perf_counter() - began_s
            chunk.give(built, wakes=chunk.took_s > _SOON_S)
        chunk.give(None, wakes=True)


class _Workers:
    """Threads that share the requests, and the way around one that hangs."""

    def __init__(self, builder: BatchBuilder, settings: LoaderSettings, chunks: _ChunkQueue) -> None:
        self._builder, self._settings, self._chunks = builder, settings, chunks
        self._workers = [_Worker(builder, settings, chunks) for _ in range(settings.num_workers)]

    def results(self, chunk: _Chunk) -> Iterator[BuiltBatch]:
        """The batches in order, with what hung on the way."""
        try:
            while (built := chunk.take(self._settings.timeout_s)) is not None:
                yield built
            return
        except _Late:
            if not (chunk.requests and self._settings.finds_stuck_sample):
                raise too_late(self._settings.timeout_s) from None
        late = chunk.requests[chunk.num_taken :]
        if late:
            yield self._without_stuck(late[0])
        if late[1:]:  # who hangs does not come to them
            yield from self.results(self._beside(late[1:]))

    def stop(self) -> None:
        """Build nothing more; waits a moment for the batches in hand, so that nothing runs beside what comes next."""
        for worker in self._workers:
            worker.is_left = True
            self._chunks.end()
        until_s = time.monotonic() + _STOP_S
        for worker in self._workers:
            worker.thread.join(max(0.0, until_s - time.monotonic()))

    def _without_stuck(self, request: BatchRequest) -> BuiltBatch:
        """What can be built of a request that hangs."""
        lost: list[LostSample] = []
        while True:
            index = self._stuck_at(request)
            lost.append(LostSample(index, hung(self._settings.timeout_s)))
            request = request.without(index)
            if len(lost) > self._builder.most_lost or len(request.indices) == 0:
                return BuiltBatch(None, tuple(lost))
            with suppress(_Late):
                return self._alone(request).with_lost(lost)

    def _stuck_at(self, request: BatchRequest) -> int:
        """The index that a thread hangs at; that thread is left behind and another takes its place."""

        def hangs(part: BatchRequest) -> bool | None:
            try:
                self._alone(part)
            except _Late:
                return True
            except Exception:  # noqa: BLE001  told when the batch is built without the one that hangs
                pass
            return None

        for worker in self._workers:
            activity = worker.heartbeat.stuck_at(request, self._settings.timeout_s)
            if activity is None:
                continue
            worker.is_left = True
            self._workers.remove(worker)
            self._workers.append(_Worker(self._builder, self._settings, self._chunks))
            if activity.index is not None:
                return activity.index
            try:
                return first_failing_sample(request, self._builder.purpose, True, hangs)
            except NoSampleAtFaultError:
                break
        raise too_late(self._settings.timeout_s)

    def _alone(self, request: BatchRequest) -> BuiltBatch:
        """The batch of this request; raises as `_Chunk.take` does."""
        built = self._beside([request]).take(self._settings.timeout_s)
        assert built is not None  # one was wanted
        return built

    def _beside(self, requests: Sequence[BatchRequest]) -> _Chunk:
        """These, from a thread of their own."""
        chunks = _ChunkQueue(requests)
        chunk = chunks.add(len(requests))
        chunks.end()
        self._workers.append(_Worker(self._builder, self._settings, chunks))
        return chunk


@contextmanager
def _one_thread_here() -> Iterator[None]:
    """Torch runs on this thread alone in what this thread calls; the other threads keep their count.

    OpenMP keeps the count for each thread that calls it, and would give each of them a team of its own. Not
    ``torch.set_num_threads``: it sets MKL's count as well, which is that of the process.
    """
    torch.get_num_threads()  # torch sets its own count where a thread first asks, and would undo ours
    with _controller().select(user_api="openmp").limit(limits=1):
        yield


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()
