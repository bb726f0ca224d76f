"""Builds batches in threads, for datasets whose ``fetch`` mostly runs torch or IO, which release the GIL."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from functools import cache
from itertools import islice

import torch
from threadpoolctl import ThreadpoolController

from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch, LateBatch
from wellfed.data.settings import LoaderSettings

Result = queue.SimpleQueue[BuiltBatch | BaseException]
Jobs = queue.SimpleQueue[tuple[BatchRequest, Result] | None]
_STOP_S = 2.0
"""Maximum seconds to wait for workers to stop."""


def built_by_threads(
    builder: BatchBuilder, requests: Iterator[BatchRequest], settings: LoaderSettings, num_requests: int
) -> Generator[BuiltBatch]:
    """Yields the batches of the requests in order.

    Raises:
        LateBatch: a batch did not come within loader.timeout_s.
    """
    jobs, ahead, stopped = Jobs(), deque[Result](), threading.Event()
    builder.turn = threading.Lock()

    def ask(number: int) -> None:
        for request in islice(requests, number):
            ahead.append(Result())
            jobs.put((request, ahead[-1]))

    # Daemon threads, since Python waits at exit for the threads of a ThreadPoolExecutor, even one that hangs.
    work = (builder, settings, jobs, stopped)
    workers = [
        threading.Thread(target=_work, args=work, name="wellfed-loader", daemon=True)
        for _ in range(settings.num_workers)
    ]
    for worker in workers:
        worker.start()
    try:
        prefetch = settings.prefetch_factor or 2
        most, at_once = settings.num_workers * prefetch, max(1, prefetch // 2)  # to wake a worker takes a while
        ask(min(most, max(1, num_requests)))
        while ahead:
            try:
                built = ahead[0].get(timeout=settings.timeout_s or None)
            except queue.Empty:
                raise LateBatch from None
            ahead.popleft()
            if isinstance(built, BaseException):
                raise built
            if len(ahead) <= most - at_once:
                ask(at_once)
            yield built
            del built
    finally:
        stopped.set()
        for _ in workers:
            jobs.put(None)
        until_s = time.monotonic() + _STOP_S
        for worker in workers:  # a worker that hangs is abandoned
            worker.join(max(0.0, until_s - time.monotonic()))


def _work(builder: BatchBuilder, settings: LoaderSettings, jobs: Jobs, stopped: threading.Event) -> None:
    torch.get_num_threads()  # torch sets its own count at a thread's first call, which would undo ours
    # OpenMP has a thread count for each calling thread. `torch.set_num_threads` would also set MKL's, of the process.
    _controller().select(user_api="openmp").limit(limits=1)
    while (job := jobs.get()) is not None and not stopped.is_set():
        request, result = job
        built: BuiltBatch | BaseException
        try:
            built = builder(request)
            built = built.pin_memory() if settings.pin_memory else built
        except BaseException as error:  # noqa: BLE001  raised again where the batch is requested
            built = error
        result.put(built)
        del built, job, result  # leave the training thread as the only holder


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()
