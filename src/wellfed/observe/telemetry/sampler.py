"""Watches a run in threads, one per source, so that a hanging driver does not stop the rest."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from wellfed.observe.telemetry.gpu import GpuSource, WatchedGpu
from wellfed.observe.telemetry.host import HostSource
from wellfed.observe.telemetry.metrics import SLOW_S
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.series import TRAINING, Phase, Reading, Sample, Source
from wellfed.observe.telemetry.ticker import Ticker
from wellfed.record import EventKind, OnEvent

_LOG = logging.getLogger(__name__)
PATIENCE_S = 1.0
"""Seconds that an event or the end of a run waits for a thread that delivers samples."""
STUCK_S = 5.0
"""Seconds after which a reading is reported as stuck."""
STOP_S = 1.0
"""Seconds that the end of a run waits for readings in progress."""
LATE_ROUNDS = 3
"""Number of consecutive readings longer than the interval that is reported."""


class Sampler:
    """Reads its sources while the ``with`` block lasts, one thread each. The training loop never waits for it.

    A sample describes the time that ends with it. When training begins or ends, a round is taken at once and counts to
    the phase that is over, as does a round then in progress. After the block no samples are delivered, even if a thread
    is still in the driver.
    """

    def __init__(
        self,
        take: Callable[[Sequence[Sample]], None],
        on_event: OnEvent,
        publish: Callable[[Sequence[Sample]], None] = lambda samples: None,
        *,
        interval_s: float,
        progress: Progress,
        time_s: Callable[[], float],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            take: gets the samples, never from two threads at once. Must not block.
            publish: gets them afterwards, from any thread. May block, which delays only its own source.
            time_s: returns the seconds since the run first started.
        """
        self._take, self._on_event, self._publish = take, on_event, publish
        self.progress, self.interval_s, self.time_s, self.now_s = progress, interval_s, time_s, now_s
        self.watches: list[_Watch] = []
        self._refused: Sequence[str] = ()
        self._lock, self._is_closed = threading.RLock(), False
        self._began_at_s = now_s()
        self._ended_at_s: float | None = None

    def watch(self, gpus: Sequence[WatchedGpu], *, host: Source | None = None, refused: Sequence[str] = ()) -> None:
        """Adds the host and these GPUs.

        Args:
            host: None = this process.
            refused: messages about what NVML can't read, reported when the block begins.
        """
        self._refused = refused
        self.add(host or HostSource(), *([GpuSource(gpus, self.event)] if gpus else []))

    def add(self, *sources: Source) -> None:
        """Adds sources. Call it before the block."""
        self.watches += [_Watch(source, self) for source in sources]

    def __enter__(self) -> Self:
        for message in self._refused:
            self.event("telemetry_trouble", trouble="refused", message=message)
        self._began_at_s = self.now_s()
        self.progress.on_edge = self._on_edge
        for watch in self.watches:
            watch.ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.on_edge = lambda left: None
        if self.progress.phase in TRAINING:  # an error or a signal ended training
            self._on_edge(self.progress.phase)
        for watch in self.watches:
            watch.ticker.stop()
        try:
            give_up_at_s = time.monotonic() + STOP_S
            for watch in self.watches:
                if not watch.ticker.join(max(0.0, give_up_at_s - time.monotonic())):
                    watch.report_left_behind()
        finally:  # a second signal may arrive during the wait
            self.close()
            self._ended_at_s = self.now_s()

    def take(self, stamped: Callable[[], Sequence[Sample]]) -> None:
        """Delivers the samples of one round. The lock keeps times from decreasing between rows."""
        with self._lock:
            samples = [] if self._is_closed else stamped()
            if samples:
                self._take(samples)
        if samples and not self._is_closed:
            self._publish(samples)

    def event(self, kind: EventKind, **facts: Any) -> None:
        """Delivers an event of the run."""
        if self._lock.acquire(timeout=PATIENCE_S):
            try:
                if not self._is_closed:
                    self._on_event(kind, **facts)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Stops all delivery; waits a moment for a delivery in progress."""
        self._is_closed = True
        if self._lock.acquire(timeout=PATIENCE_S):
            self._lock.release()

    def cpu_frac(self) -> float:
        """Returns the CPU time of the threads over the time they have run."""
        ended_at_s = self.now_s() if self._ended_at_s is None else self._ended_at_s
        return self.cpu_s() / max(1e-9, ended_at_s - self._began_at_s)

    def cpu_s(self) -> float:
        """Returns the CPU time of the threads, up to their latest readings."""
        return sum(watch.ticker.cpu_s for watch in self.watches)

    def _on_edge(self, left: Phase) -> None:
        for watch in self.watches:
            watch.at_edge(left)


class _Watch:
    """One source and its thread."""

    def __init__(self, source: Source, sampler: Sampler) -> None:
        self._source, self._sampler = source, sampler
        self._interval_s, self._progress, self._now_s = sampler.interval_s, sampler.progress, sampler.now_s
        self.ticker = Ticker(source.name, self._interval_s, self._round, self._close, now_s=self._now_s)
        self._edges: deque[tuple[Phase, int]] = deque()
        self._slow_at_s = self._now_s()
        self._late_rounds = 0
        self._reported: set[str] = set()
        self._reporting = threading.Lock()

    def at_edge(self, left: Phase) -> None:
        """Takes a round for the phase that is over."""
        self._edges.append((left, self._progress.step))
        self.ticker.nudge()

    def report_if_stuck(self) -> None:
        """Reports once that the current reading makes no progress."""
        if (busy_s := self.ticker.busy_s()) >= STUCK_S:
            self._trouble("stuck", f"a reading of the {self._source.name} has not come back for {busy_s:.0f} s.")

    def report_left_behind(self) -> None:
        if "slow" not in self._reported:
            self._trouble("stuck", f"a reading of the {self._source.name} had not come back when the run ended.")

    def _round(self) -> None:
        for watch in self._sampler.watches:  # a hanging thread can't report itself
            watch.report_if_stuck()
        with self._guarded():
            edge = self._edges.popleft() if self._edges else None
            began_at_s = self._now_s()
            is_slow = edge is None and began_at_s >= self._slow_at_s
            if is_slow:
                self._slow_at_s = began_at_s + max(SLOW_S, self._interval_s)
            self._read(is_slow, edge)
            took_s = self._now_s() - began_at_s
            self._late_rounds = self._late_rounds + 1 if took_s > self._interval_s else 0
            if self._late_rounds == LATE_ROUNDS:
                takes = f"a reading of the {self._source.name} takes {took_s:.2f} s"
                longer = f"longer than the {self._interval_s:g} s between readings"
                self._trouble("slow", f"{takes}, {longer}: there are fewer rows.")
            if self._edges:
                self.ticker.nudge()

    def _read(self, is_slow: bool, edge: tuple[Phase, int] | None) -> None:
        """Delivers the readings, at once or one by one if the driver is slow."""
        pending: list[Reading] = []
        handed_over_at_s = self._now_s()
        for reading in self._source.read(slow=is_slow, edge=edge is not None):
            self.ticker.moved()
            if reading.values:
                pending.append(reading)
            if self._now_s() - handed_over_at_s >= self._interval_s:
                self._hand_over(pending, edge)
                pending, handed_over_at_s = [], self._now_s()
        self._hand_over(pending, edge)

    def _hand_over(self, readings: Sequence[Reading], edge: tuple[Phase, int] | None) -> None:
        # If training began or ended during this round, it counts to the time before.
        before = edge or (self._edges[0] if self._edges else None)

        def stamped() -> list[Sample]:
            phase, step = before or (self._progress.phase, self._progress.step)
            time_s = self._sampler.time_s()
            return [Sample(time_s, step, phase, gpu, values) for gpu, values in readings]

        if readings:
            self._sampler.take(stamped)

    def _close(self) -> None:
        while self._edges:  # training has just ended: its last interval counts
            self._round()
        with self._guarded():
            self._source.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Reports an error, and keeps it from the training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            _LOG.exception("the %s thread has failed", self._source.name)
            self._trouble("failed", f"the {self._source.name} is no longer watched: {type(error).__name__}: {error}")
            self._edges.clear()
            self.ticker.stop()

    def _trouble(self, trouble: str, message: str) -> None:
        with self._reporting:  # other threads report about this one, too
            is_new = trouble not in self._reported
            self._reported.add(trouble)
        if is_new:
            self._sampler.event("telemetry_trouble", trouble=trouble, message=message)
