"""Builds batches in threads, for datasets whose ``fetch`` spends its time in torch or IO, which release the GIL.

Building a cheap batch takes less time than switching threads. So a worker is given several cheap batches at a time, a
chunk, and wakes the training thread once for all of them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice

import torch
from threadpoolctl import ThreadpoolController

from wellfed.data.backends.bad_samples import too_late
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch
from wellfed.data.settings import LoaderSettings

_SOON_S = 0.001
"""Chunks grow while a worker finishes one in less time than this; hardly any step is shorter."""
_STOP_S = 2.0
"""Maximum wait for workers to stop."""


def built_by_threads(
    builder: BatchBuilder, requests: Iterable[BatchRequest], settings: LoaderSettings, num_requests: int
) -> Generator[BuiltBatch]:
    """Yields the batches of the requests in order. The workers read ``requests``, one worker at a time.

    Raises:
        DataError: a batch did not come within loader.timeout_s.
    """
    chunks, ahead, length = _ChunkQueue(requests), deque[_Chunk](), 1
    prefetch = min(settings.prefetch_factor or 2, max(1, num_requests))
    room = min(settings.num_workers * prefetch + 1, max(1, num_requests))  # the step holds one batch
    # Daemons: at exit Python waits for the threads of a ThreadPoolExecutor, even for one that hangs.
    workers = [
        threading.Thread(target=_work, args=(builder, settings, chunks), name="wellfed-loader", daemon=True)
        for _ in range(settings.num_workers)
    ]
    for worker in workers:
        worker.start()
    try:
        while True:
            while room >= length:
                ahead.append(chunks.add(length))
                room -= length
            chunk = ahead.popleft()
            while (built := chunk.take(builder.purpose, settings.timeout_s)) is not None:
                yield built
            if len(chunk.requests) < chunk.length:
                return
            room += chunk.length
            length = 2 * length if chunk.took_s < _SOON_S else length // 2
            length = max(1, min(length, prefetch // 2))  # one half is built while the other is used
    finally:
        chunks.stop(workers)


class _Chunk:
    """Successive batches that one worker builds in a row."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.requests: Sequence[BatchRequest] = ()
        """Set when a worker takes the chunk; fewer than ``length`` at the end of the epoch."""
        self.took_s = 0.0
        """Time to build all of them, once they are built."""
        self._num_taken = 0
        self._given: deque[BuiltBatch | BaseException | None] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def give(self, built: BuiltBatch | BaseException | None, *, wakes: bool) -> None:
        """Adds the next batch, or None after the last; ``wakes`` the training thread."""
        self._given.append(built)
        if wakes:
            self._news.put(None)

    def take(self, purpose: str, timeout_s: float) -> BuiltBatch | None:
        """Waits for the next batch and returns it; None after the last. Raises what building it raised.

        Raises:
            DataError: it did not come within ``timeout_s``; 0 = no limit.
        """
        while not self._given:
            try:
                self._news.get(timeout=timeout_s or None)
            except queue.Empty:
                if not self._given:
                    request = self.requests[self._num_taken] if self._num_taken < len(self.requests) else None
                    raise too_late(request, purpose, timeout_s) from None
        built = self._given.popleft()
        if isinstance(built, BaseException):
            raise built
        self._num_taken += 1
        return built


class _ChunkQueue:
    """Hands the requests to the workers in chunks.

    The workers also create the requests. In the training thread that would take as long as the rest of its work for a
    batch.
    """

    def __init__(self, requests: Iterable[BatchRequest]) -> None:
        self._requests = iter(requests)
        self._wanted: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self.stopped = threading.Event()
        """Workers finish their current batch and build no more."""

    def add(self, length: int) -> _Chunk:
        """Adds a chunk of ``length`` batches to be built."""
        chunk = _Chunk(length)
        self._wanted.put(chunk)
        return chunk

    def take(self) -> _Chunk | None:
        """Waits for the next chunk and gives it its requests; None = no more."""
        with self._turn:  # held while waiting: chunks get their requests in the order in which they were added
            chunk = self._wanted.get()
            if chunk is not None:
                try:
                    chunk.requests = list(islice(self._requests, chunk.length))
                except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
                    chunk.give(error, wakes=True)
        return chunk

    def stop(self, workers: Sequence[threading.Thread]) -> None:
        """Stops the workers and waits up to `_STOP_S` for their current batches, so that none runs beside a new pass.

        A worker that hangs stays behind.
        """
        self.stopped.set()
        for _ in workers:
            self._wanted.put(None)
        until_s = time.monotonic() + _STOP_S
        for worker in workers:
            worker.join(max(0.0, until_s - time.monotonic()))


def _work(builder: BatchBuilder, settings: LoaderSettings, chunks: _ChunkQueue) -> None:
    """Builds chunk after chunk until the queue is stopped."""
    with _one_thread_here():
        while not chunks.stopped.is_set() and (chunk := chunks.take()) is not None:
            began_s = time.perf_counter()
            for request in chunk.requests:
                if chunks.stopped.is_set():
                    return
                built: BuiltBatch | BaseException
                try:
                    built = builder(request)
                    built = built.pin_memory() if settings.pin_memory else built
                except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
                    built = error
                chunk.took_s = time.perf_counter() - began_s
                chunk.give(built, wakes=chunk.took_s > _SOON_S)
                del built  # the training thread alone holds it
            chunk.give(None, wakes=True)


@contextmanager
def _one_thread_here() -> Iterator[None]:
    """Runs torch on this thread alone in everything that this thread calls; other threads keep their count.

    OpenMP keeps a count for each calling thread and would give each a team of its own. ``torch.set_num_threads`` would
    also set MKL's count, which belongs to the process.
    """
    torch.get_num_threads()  # torch sets its own count at a thread's first call, and would undo ours
    with _controller().select(user_api="openmp").limit(limits=1):
        yield


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()
