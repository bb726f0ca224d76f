"""The batches of requests, built as a loader plan says, by producers that a loader starts and stops."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

from wellfed.loading import backends, threads
from wellfed.loading.backends import LoaderPlan
from wellfed.loading.builder import BatchBuilder
from wellfed.loading.processes import ProcessBackend
from wellfed.loading.requests import Built, Request


class BatchSource:
    """One pass at a time; worker processes live on from pass to pass where the plan says so.

    A pass is read, and so closed, by the thread that has started it: the data may hold that up with a batch for which
    another thread can't wait. It then ends when it has its batch, and finds that it `is_left`.
    """

    def __init__(self, builder: BatchBuilder, plan: LoaderPlan) -> None:
        """
        Raises:
            DataError: worker processes would be sent what can't be pickled.
        """
        self._builder, self._plan = builder, plan
        self._processes = ProcessBackend(builder, plan) if plan.backend in ("torch", "processes") else None
        self._running: Generator[Built] | None = None
        self._reader = threading.current_thread()

    def start(self, requests: Iterator[Request], num_requests: int) -> Generator[Built]:
        """The batches of so many requests, in their order; ends the pass before."""
        self.stop()
        self._running, self._reader = self._build(requests, num_requests), threading.current_thread()
        return self._running

    def is_left(self, running: Generator[Built]) -> bool:
        """Whether this pass was stopped, or another started, while its reader waited for a batch."""
        return self._running is not running

    def stop(self) -> None:
        """End the pass; worker processes that live on stay."""
        running, self._running = self._running, None
        if running is None:
            return
        if self._reader is threading.current_thread() or not self._reader.is_alive():
            running.close()
        else:
            self._processes = None  # they are that thread's

    def close(self) -> None:
        """End the pass and the worker processes; a later `start` has others."""
        self.stop()
        self._processes = None

    def _build(self, requests: Iterator[Request], num_requests: int) -> Generator[Built]:
        if self._plan.backend == "inline":
            return backends.inline(self._builder, requests, self._plan)
        if self._plan.backend == "threads":
            return threads.built_ahead(self._builder, requests, self._plan, num_requests)
        self._processes = self._processes or ProcessBackend(self._builder, self._plan)
        return self._processes(requests)
