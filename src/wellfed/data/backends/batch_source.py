"""Builds the requested batches, in order, by the backend that the settings name."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest, BuiltBatch
from wellfed.data.backends.process_backend import ProcessBackend
from wellfed.data.backends.thread_backend import built_by_threads
from wellfed.data.settings import LoaderSettings


class BatchSource:
    """Runs one pass over requests at a time; persistent worker processes serve several passes.

    The thread that starts a pass reads and closes it. If the dataset blocks that thread, another thread may stop the
    pass. The blocked thread then ends the pass once it has its batch; `is_left` returns True for it.
    """

    def __init__(self, builder: BatchBuilder, settings: LoaderSettings) -> None:
        self._builder, self._settings = builder, settings
        self._processes = ProcessBackend(builder, settings) if settings.backend in ("torch", "processes") else None
        self._running: Generator[BuiltBatch] | None = None
        self._reader = threading.current_thread()

    def start(self, requests: Iterator[BatchRequest], num_requests: int) -> Generator[BuiltBatch]:
        """Ends the previous pass and returns the batches of ``num_requests`` requests, in order."""
        self.stop()
        if self._settings.backend == "inline":
            self._running = self._built_here(requests)
        elif self._settings.backend == "threads":
            self._running = built_by_threads(self._builder, requests, self._settings, num_requests)
        else:
            self._processes = self._processes or ProcessBackend(self._builder, self._settings)
            self._running = self._processes(requests)
        self._reader = threading.current_thread()
        return self._running

    def is_left(self, running: Generator[BuiltBatch]) -> bool:
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

    def _built_here(self, requests: Iterator[BatchRequest]) -> Generator[BuiltBatch]:
        for request in requests:
            built = self._builder(request)
            yield built.pin_memory() if self._settings.pin_memory else built
