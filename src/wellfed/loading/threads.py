"""Batches from threads, for data whose ``fetch`` spends its time in torch or IO, which release Python's lock.

A cheap batch is built in less time than it takes to change threads, so neither side wakes the other for each: producers
are given several batches at a time where these are soon built, and tell when they are through.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice

from wellfed.loading.backends import LoaderPlan, hung, is_stuck, search, too_late
from wellfed.loading.bisect import Innocent
from wellfed.loading.builder import BatchBuilder
from wellfed.loading.heartbeats import Doing, Notes
from wellfed.loading.limits import one_thread_here
from wellfed.loading.requests import Built, Lost, Request

_SOON_S = 0.001
"""Producers are given more at a time as long as they are through with it in less: hardly a step is shorter."""
_STOP_S = 2.0
"""Longest wait for producers that have been told to stop."""


def built_ahead(
    builder: BatchBuilder, requests: Iterable[Request], plan: LoaderPlan, num_requests: int
) -> Generator[Built]:
    """The batches of the requests in order. ``requests`` is read by the producers, one at a time.

    Args:
        num_requests: no more are wanted ahead than there are.

    Raises:
        DataError: a batch did not come in time, and no sample can be shown to be at fault.
    """
    jobs, ahead, length = _Jobs(requests), deque[Stretch](), 1
    prefetch = min(plan.prefetch_factor or 2, max(1, num_requests))
    room = min(plan.num_workers * prefetch, max(1, num_requests))
    producers = _Producers(builder, plan, jobs)
    try:
        while True:
            while room >= length:
                ahead.append(jobs.want(length))
                room -= length
            stretch = ahead.popleft()
            yield from producers.results(stretch)
            if len(stretch.requests) < stretch.length:
                return
            room += stretch.length
            length = 2 * length if stretch.took_s < _SOON_S else length // 2
            length = max(1, min(length, prefetch // 2))  # while one half is used up, the other is built
    finally:
        producers.stop()


class _Late(Exception):
    """A batch did not come in time. Not queue.Empty, which the data itself may raise."""


class Stretch:
    """Successive batches that one producer builds in a row."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.requests: Sequence[Request] = ()
        """Once a producer has come to it; fewer than ``length`` where the epoch ends."""
        self.num_taken = 0
        self.took_s = 0.0
        """Time to build them all, once they are."""
        self._given: deque[Built | BaseException | None] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def give(self, built: Built | BaseException | None, *, wakes: bool) -> None:
        """The next, or None behind the last; ``wakes`` who waits for it."""
        self._given.append(built)
        if wakes:
            self._news.put(None)

    def take(self, timeout_s: float) -> Built | None:
        """The next batch, waited for; None behind the last. 0 waits for ever.

        Raises:
            _Late: it did not come in time.
            BaseException: what building it raised.
        """
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


class _Jobs:
    """The requests, dealt to producers in stretches.

    The producers make them too: in the training thread that would cost a step as much as all else it does for its
    batch.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = iter(requests)
        self._wanted: queue.SimpleQueue[Stretch | None] = queue.SimpleQueue()
        self._turn = threading.Lock()

    def want(self, length: int) -> Stretch:
        """So many more are to be built."""
        stretch = Stretch(length)
        self._wanted.put(stretch)
        return stretch

    def no_more(self) -> None:
        """One producer may end."""
        self._wanted.put(None)

    def take(self) -> Stretch | None:
        """The next stretch, waited for, with its requests; None = no more."""
        with self._turn:  # also while it waits: stretches get their requests in the order in which they are wanted
            stretch = self._wanted.get()
            if stretch is not None:
                try:
                    stretch.requests = list(islice(self._requests, stretch.length))
                except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
                    stretch.give(error, wakes=True)
        return stretch


class _Producer:
    """A thread that builds what it is dealt. It may be left behind: Python waits at its exit for the threads of a
    ThreadPoolExecutor, also for a stuck one."""

    def __init__(self, builder: BatchBuilder, plan: LoaderPlan, jobs: _Jobs) -> None:
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
        with one_thread_here():
            while not self.is_left() and (stretch := self._jobs.take()) is not None:
                self._build(stretch)

    def _build(self, stretch: Stretch) -> None:
        note, began_s = self._notes.row(0), time.perf_counter()
        for request in stretch.requests:
            if self.is_left():
                return
            built: Built | BaseException
            try:
                built = self._builder(request, note)
                built = built.pin_memory() if self._pins else built
            except BaseException as error:  # noqa: BLE001  raised again where the batch is asked for
                built = error
            stretch.took_s = time.perf_counter() - began_s
            stretch.give(built, wakes=stretch.took_s > _SOON_S)
        stretch.give(None, wakes=True)


class _Producers:
    """Threads that share the requests, and the way around one that hangs."""

    def __init__(self, builder: BatchBuilder, plan: LoaderPlan, jobs: _Jobs) -> None:
        self._builder, self._plan, self._jobs = builder, plan, jobs
        self._producers = [_Producer(builder, plan, jobs) for _ in range(plan.num_workers)]

    def results(self, stretch: Stretch) -> Iterator[Built]:
        """The batches in order, with what hung on the way.

        Raises:
            DataError: one did not come in time, and no sample can be shown to be at fault.
        """
        try:
            while (built := stretch.take(self._plan.timeout_s)) is not None:
                yield built
            return
        except _Late:
            if not (stretch.requests and self._plan.searches):
                raise too_late(self._plan.timeout_s) from None
        late = stretch.requests[stretch.num_taken :]
        if late:
            yield self._without_stuck(late[0])
        if late[1:]:  # who hangs does not come to them
            yield from self.results(self._attempt(late[1:]))

    def stop(self) -> None:
        """Build nothing more; waits a moment for the batches in hand, so that nothing runs beside what comes next."""
        for producer in self._producers:
            producer.leave()
            self._jobs.no_more()
        until_s = time.monotonic() + _STOP_S
        for producer in self._producers:
            producer.thread.join(max(0.0, until_s - time.monotonic()))

    def _without_stuck(self, request: Request) -> Built:
        """What can be built of a request that hangs."""
        lost: list[Lost] = []
        while True:
            index = self._stuck_at(request)
            lost.append(Lost(index, hung(self._plan.timeout_s)))
            request = request.without(index)
            if len(lost) > self._builder.most_lost or len(request.indices) == 0:
                return Built(None, tuple(lost))
            try:
                return self._alone(request).with_lost(lost)
            except _Late:
                continue

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
                return search(request, self._builder.what, True, self._hangs)
            except Innocent:
                break
        raise too_late(self._plan.timeout_s)

    def _hangs(self, part: Request) -> bool | None:
        try:
            self._alone(part)
        except _Late:
            return True
        except Exception:  # noqa: BLE001  told when the batch is built without the one that hangs
            return None
        return None

    def _alone(self, request: Request) -> Built:
        """The batch of this request; raises as `Stretch.take` does."""
        built = self._attempt([request]).take(self._plan.timeout_s)
        assert built is not None  # one was wanted
        return built

    def _attempt(self, requests: Sequence[Request]) -> Stretch:
        """These, from a thread of their own."""
        jobs = _Jobs(requests)
        stretch = jobs.want(len(requests))
        jobs.no_more()
        self._producers.append(_Producer(self._builder, self._plan, jobs))
        return stretch
