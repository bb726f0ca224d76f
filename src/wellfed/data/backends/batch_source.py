"""Builds the requested batches, in order, by the backend that the settings name."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator

from wellfed.batches import Delivery
from wellfed.data.backends.bad_samples import SHARED, BadSamples
from wellfed.data.backends.batch_builder import BatchBuilder, UnreadBatch
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch, LateBatch
from wellfed.data.backends.process_backend import ProcessBackend
from wellfed.data.backends.thread_backend import built_by_threads
from wellfed.data.settings import LoaderSettings
from wellfed.errors import DataError


class BatchSource:
    """Runs one pass over requests at a time; persistent worker processes serve several passes.

    The thread that starts a pass reads and closes it. If the dataset blocks that thread, another thread may stop the
    pass. The blocked thread then ends the pass once it has its batch.
    """

    def __init__(self, builder: BatchBuilder, settings: LoaderSettings, bad: BadSamples) -> None:
        self._builder, self._settings, self._bad = builder, settings, bad
        self._processes: ProcessBackend | None = None
        self._running: Generator[Delivery] | None = None
        self._reader = threading.current_thread()

    def start(self, requests: Iterator[BatchRequest], num_requests: int) -> Generator[Delivery]:
        """Ends the previous pass, and returns the deliveries of these requests, in order.

        Raises:
            DataError: a batch can't be built, or comes too late.
        """
        self.stop()
        self._running = self._deliveries(map(self._bad.leave_out, requests), num_requests)
        self._reader = threading.current_thread()
        return self._running

    def _deliveries(self, requests: Iterator[BatchRequest], num_requests: int) -> Generator[Delivery]:
        running, asked = self._running, deque[BatchRequest]()

        def noted() -> Iterator[BatchRequest]:
            for request in requests:
                asked.append(request)
                yield request

        source = self._built(noted(), num_requests)
        try:
            for built in source:
                if self._running is not running:
                    return  # another pass began while a batch blocked this thread
                yield self._delivery(asked.popleft(), built)
                del built
        except LateBatch:
            raise self._too_late(asked[0]) from None
        except UnreadBatch as error:
            if self._settings.num_workers and self._builder.loads(asked[0]):
                raise DataError(f"{error.problem} {SHARED}") from error
            raise
        finally:
            source.close()

    def _built(self, requests: Iterator[BatchRequest], num_requests: int) -> Generator[BuiltBatch]:
        if not self._settings.num_workers:
            return self._built_here(requests)
        if self._settings.backend == "threads":
            return built_by_threads(self._builder, requests, self._settings, num_requests)
        self._processes = self._processes or ProcessBackend(self._builder, self._settings)
        return self._processes(requests)

    def _built_here(self, requests: Iterator[BatchRequest]) -> Generator[BuiltBatch]:
        for request in requests:
            built = self._builder(request)
            yield built.pin_memory() if self._settings.pin_memory else built

    def _delivery(self, request: BatchRequest, built: BuiltBatch) -> Delivery:
        if built.lost:
            loads = (lambda index: self._builder.loads(request.only(index))) if self._settings.num_workers else None
            self._bad.take(built.lost, request, loads)
        num_lost = len(built.lost)
        size = request.indices.numel() - num_lost
        if built.batch is None:
            raise self._builder.nothing_given(request) if size else self._bad.none_left(request)
        return Delivery(
            built.batch,
            request.epoch,
            request.batch,
            request.total - num_lost,
            request.is_padding,
            num_samples=size if self._builder.splits_itself else None,
            took=built.took,
        )

    def _too_late(self, request: BatchRequest) -> DataError:
        purpose, limit_s = self._builder.purpose, self._settings.timeout_s
        way_out = (
            "Set loader.timeout_s higher (0 = wait for ever), or loader.backend=inline loader.num_workers=0 to see "
            "where it hangs."
        )
        if purpose == "training":
            way_out += " If a sample hangs (dataset[index] shows which), repair it or add it to loader.skip_ids."
        return DataError(
            f"No batch came within loader.timeout_s={limit_s:g} s: a worker is stuck or too slow. It was asked for "
            f"{request.described(purpose)}. {way_out}"
        )

    def stop(self) -> None:
        """Ends the pass; persistent worker processes stay."""
        running, self._running = self._running, None
        if running is None:
            return
        if self._reader is threading.current_thread() or not self._reader.is_alive():
            running.close()
        else:
            self._processes = None  # owned by the blocked thread

    def close(self) -> None:
        """Ends the pass and the worker processes; a later `start` starts new ones."""
        self.stop()
        self._processes = None
