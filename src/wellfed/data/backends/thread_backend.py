"""Builds batches in threads, for datasets whose ``fetch`` mostly runs torch or IO, which release the GIL.

Switching threads costs more than building a cheap batch. So a worker gets several cheap batches at a time, a chunk, and
wakes the training thread once per chunk.
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
"""Seconds per chunk below which chunks grow; steps are hardly ever shorter."""
_STOP_S = 2.0
"""Maximum seconds to wait for workers to stop."""


def built_by_threads(
    builder: BatchBuilder, requests: Iterable[BatchRequest], settings: LoaderSettings, num_requests: int
) -> Generator[BuiltBatch]:
    """Yields the batches of the requests in order. One worker at a time reads ``requests``.

    Raises:
        DataError: a batch did not come within loader.timeout_s.
    """
    chunks, ahead, length = _ChunkQueue(requests), deque[_Chunk](), 1
    prefetch = min(settings.prefetch_factor or 2, max(1, num_requests))
    room = min(settings.num_workers * prefetch + 1, max(1, num_requests))  # the step holds one batch
    # Daemon threads, since Python waits at exit for the threads of a ThreadPoolExecutor, even one that hangs.
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
            length = max(1, min(length, prefetch // 2))  # one half is used while the other is built
    finally:
        chunks.stop(workers)


class _Chunk:
    """Successive batches that one worker builds in a row."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.requests: Sequence[BatchRequest] = ()
        """Set when a worker takes the chunk; shorter than ``length`` at the end of the epoch."""
        self.took_s = 0.0
        """Seconds to build all batches, once they are built."""
        self._num_taken = 0
        self._given: deque[BuiltBatch | BaseException | None] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def give(self, built: BuiltBatch | BaseException | None, *, wakes: bool) -> None:
        """Adds the next batch, or None after the last; ``wakes`` the training thread."""
        self._given.append(built)
        if wakes:
            self._news.put(None)

    def take(self, purpose: str, timeout_s: float) -> BuiltBatch | None:
        """Waits for the next batch and returns it; None after the last. Raises the error of building it.

        Raises:
            DataError: no batch within ``timeout_s``; 0 = no limit.
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
    """A queue of chunks for the workers, which also create the requests to keep the training thread free."""

    def __init__(self, requests: Iterable[BatchRequest]) -> None:
        self._requests = iter(requests)
        self._wanted: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self.stopped = threading.Event()
        """Set to make workers stop after their current batch."""

    def add(self, length: int) -> _Chunk:
        """Adds a chunk of ``length`` batches to be built."""
        chunk = _Chunk(length)
        self._wanted.put(chunk)
        return chunk

    def take(self) -> _Chunk | None:
        """Waits for the next chunk and fills in its requests; None = no more."""
        with self._turn:  # held while waiting, so that chunks get their requests in order
            chunk = self._wanted.get()
            if chunk is not None:
                try:
                    chunk.requests = list(islice(self._requests, chunk.length))
                except BaseException as error:  # noqa: BLE001  raised again where the batch is requested
                    chunk.give(error, wakes=True)
        return chunk

    def stop(self, workers: Sequence[threading.Thread]) -> None:
        """Stops the workers and waits up to `_STOP_S` for their current batches, before a new pass starts.

        A worker that hangs is abandoned.
        """
        self.stopped.set()
        for _ in workers:
            self._wanted.put(None)
        until_s = time.monotonic() + _STOP_S
        for worker in workers:
            worker.join(max(0.0, until_s - time.monotonic()))


def _work(builder: BatchBuilder, settings: LoaderSettings, chunks: _ChunkQueue) -> None:
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
                except BaseException as error:  # noqa: BLE001  raised again where the batch is requested
                    built = error
                chunk.took_s = time.perf_counter() - began_s
                chunk.give(built, wakes=chunk.took_s > _SOON_S)
                del built  # leave the training thread as the only holder
            chunk.give(None, wakes=True)


@contextmanager
def _one_thread_here() -> Iterator[None]:
    """Limits torch to one thread in calls from this thread; other threads keep their limit.

    OpenMP has a thread count for each calling thread. ``torch.set_num_threads`` would also set MKL's, which belongs to
    the process.
    """
    torch.get_num_threads()  # torch sets its own count at a thread's first call, which would undo ours
    with _controller().select(user_api="openmp").limit(limits=1):
        yield


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()
