"""Builds the requested batches, in order, by the backend that the settings name."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator

from wellfed.data.backends.bad_samples import UnreadBatch, shared_by_workers, too_late
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch, LateBatch
from wellfed.data.backends.process_backend import ProcessBackend
from wellfed.data.backends.thread_backend import built_by_threads
from wellfed.data.settings import LoaderSettings

Answers = Generator[tuple[BatchRequest, BuiltBatch]]


class BatchSource:
    """Runs one pass over requests at a time; persistent worker processes serve several passes.

    The thread that starts a pass reads and closes it. If the dataset blocks that thread, another thread may stop the
    pass. The blocked thread then ends the pass once it has its batch; `is_left` returns True for it.
    """

    def __init__(self, builder: BatchBuilder, settings: LoaderSettings) -> None:
        self._builder, self._settings = builder, settings
        self._processes = ProcessBackend(builder, settings) if settings.backend in ("torch", "processes") else None
        self._running: Answers | None = None
        self._reader = threading.current_thread()

    def start(self, requests: Iterator[BatchRequest], num_requests: int) -> Answers:
        """Ends the previous pass and returns ``num_requests`` requests with their batches, in order."""
        self.stop()
        self._running = self._answers(requests, num_requests)
        self._reader = threading.current_thread()
        return self._running

    def _answers(self, requests: Iterator[BatchRequest], num_requests: int) -> Answers:
        asked: deque[BatchRequest] = deque()

        def noted() -> Iterator[BatchRequest]:
            for request in requests:
                asked.append(request)
                yield request

        running = self._built(noted(), num_requests)
        try:
            for built in running:
                yield asked.popleft(), built
        except LateBatch:
            raise too_late(asked[0], self._builder.purpose, self._settings.timeout_s) from None
        except UnreadBatch as error:
            if self._settings.num_workers and self._loads_here(asked[0]):
                raise shared_by_workers(error) from None
            raise
        finally:
            running.close()

    def _built(self, requests: Iterator[BatchRequest], num_requests: int) -> Generator[BuiltBatch]:
        if self._settings.backend == "inline":
            return self._built_here(requests)
        if self._settings.backend == "threads":
            return built_by_threads(self._builder, requests, self._settings, num_requests)
        self._processes = self._processes or ProcessBackend(self._builder, self._settings)
        return self._processes(requests)

    def _built_here(self, requests: Iterable[BatchRequest]) -> Generator[BuiltBatch]:
        for request in requests:
            built = self._builder(request)
            yield built.pin_memory() if self._settings.pin_memory else built

    def _loads_here(self, request: BatchRequest) -> bool:
        try:
            self._builder(request)
        except Exception:  # noqa: BLE001  whatever the dataset raises
            return False
        return True

    def is_left(self, running: Answers) -> bool:
        """Returns whether this pass was stopped, or another started, while its reader waited for a batch."""
        return self._running is not running

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
