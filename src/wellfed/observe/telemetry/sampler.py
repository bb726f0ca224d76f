"""Watches a run in threads, one per source, so that a hanging driver does not stop the rest."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.telemetry.gpu import GpuSource
from wellfed.observe.telemetry.host import HostSource
from wellfed.observe.telemetry.metrics import SLOW_S
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.series import TRAINING, Phase, Reading, Sample, Source
from wellfed.record.entries import EventKind, OnEvent

_LOG = logging.getLogger(__name__)
STOP_S = 1.0
"""Seconds that the end of a run waits for readings in progress, and then for their delivery."""


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
        self._lock, self._is_closed = threading.Lock(), False
        self._began_at_s = now_s()
        self._ended_at_s: float | None = None

    def watch(self, gpus: Iterable[GpuFacts], *, host: Source | None = None, refused: Sequence[str] = ()) -> None:
        """Adds the host, and those of these GPUs that NVML can read.

        Args:
            host: None = this process.
            refused: messages about what NVML can't read, reported when the block begins.
        """
        self._refused = refused
        seen = [gpu for gpu in gpus if gpu.uuid is not None and gpu.nvml_index is not None]
        self.add(host or HostSource(), *([GpuSource(seen, self.event)] if seen else []))

    def add(self, *sources: Source) -> None:
        """Adds sources. Call it before the block."""
        self.watches += [_Watch(source, self) for source in sources]

    def __enter__(self) -> Self:
        for message in self._refused:
            self.event("telemetry_trouble", trouble="refused", message=message)
        self._began_at_s = self.now_s()
        self.progress.on_edge = self._on_edge
        for watch in self.watches:
            watch.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.on_edge = lambda left: None
        if self.progress.phase in TRAINING:  # an error or a signal ended training
            self._on_edge(self.progress.phase)
        for watch in self.watches:
            watch.stop()
        try:
            give_up_at_s = time.monotonic() + STOP_S
            for watch in self.watches:
                watch.thread.join(max(0.0, give_up_at_s - time.monotonic()))
                if watch.thread.is_alive():
                    message = f"a reading of the {watch.source.name} had not come back when the run ended."
                    self.event("telemetry_trouble", trouble="stuck", message=message)
        finally:  # a second signal may arrive during the wait
            self._is_closed, self._ended_at_s = True, self.now_s()
            if self._lock.acquire(timeout=STOP_S):  # a delivery may be in progress
                self._lock.release()

    def deliver(self, readings: Sequence[Reading], before: tuple[Phase, int] | None) -> None:
        """Delivers the readings of one round; ``before`` are phase and step if they count to a phase that is over."""
        with self._lock:  # keeps times from decreasing between rows
            if self._is_closed or not readings:
                return
            phase, step = before or (self.progress.phase, self.progress.step)
            time_s = self.time_s()
            samples = [Sample(time_s, step, phase, gpu, values) for gpu, values in readings]
            self._take(samples)
        if not self._is_closed:
            self._publish(samples)

    def event(self, kind: EventKind, **facts: Any) -> None:
        """Delivers an event of the run."""
        if not self._is_closed:
            self._on_event(kind, **facts)

    def cpu_frac(self) -> float:
        """Returns the CPU time of the threads over the time they have run."""
        ended_at_s = self.now_s() if self._ended_at_s is None else self._ended_at_s
        return self.cpu_s() / max(1e-9, ended_at_s - self._began_at_s)

    def cpu_s(self) -> float:
        """Returns the CPU time of the threads, up to their latest readings."""
        return sum(watch.cpu_s for watch in self.watches)

    def _on_edge(self, left: Phase) -> None:
        for watch in self.watches:
            watch.at_edge(left)


class _Watch:
    """One source and its thread, which reads it every interval without drift. Missed rounds are skipped."""

    def __init__(self, source: Source, sampler: Sampler) -> None:
        self.source, self._sampler = source, sampler
        self._edges: deque[tuple[Phase, int]] = deque()
        """Phases that are over, with their last step, whose round was not taken yet."""
        self._slow_at_s = sampler.now_s()
        self._wake, self._is_stopping = threading.Event(), False
        self.cpu_s = 0.0
        """CPU seconds of the thread so far."""
        # A daemon thread, so that the process ends even if a driver call never returns.
        self.thread = threading.Thread(target=self._run, name=f"wellfed-{source.name}", daemon=True)

    def at_edge(self, left: Phase) -> None:
        """Takes a round for the phase that is over."""
        self._edges.append((left, self._sampler.progress.step))
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread after the current round."""
        self._is_stopping = True
        self._wake.set()

    def _run(self) -> None:
        """Reads until the end. An error is reported, ends the readings, and is kept from the training."""
        try:
            beat_at_s = self._sampler.now_s()
            while not self._is_stopping or self._edges:  # training has just ended: its last interval counts
                self._round()
                self.cpu_s, now_s = time.thread_time(), self._sampler.now_s()
                beat_at_s = next_beat(beat_at_s, now_s, self._sampler.interval_s)
                if not (self._is_stopping or self._edges):
                    self._wake.wait(min(beat_at_s - now_s, threading.TIMEOUT_MAX))
                    self._wake.clear()
        except Exception as error:  # noqa: BLE001
            name = self.source.name
            _LOG.exception("the %s thread has failed", name)
            message = f"the {name} is no longer watched: {type(error).__name__}: {error}"
            self._sampler.event("telemetry_trouble", trouble="failed", message=message)
        finally:
            with suppress(Exception):  # of a driver that is lost
                self.source.close()
            self.cpu_s = time.thread_time()

    def _round(self) -> None:
        edge = self._edges.popleft() if self._edges else None
        now_s = self._sampler.now_s()
        is_slow = edge is None and now_s >= self._slow_at_s
        if is_slow:
            self._slow_at_s = now_s + max(SLOW_S, self._sampler.interval_s)
        readings = [each for each in self.source.read(slow=is_slow, edge=edge is not None) if each.values]
        # If training began or ended during this round, it counts to the time before.
        self._sampler.deliver(readings, edge or (self._edges[0] if self._edges else None))


def next_beat(beat_at_s: float, now_s: float, interval_s: float) -> float:
    """Returns the first beat after now, where beats are ``beat_at_s`` plus whole intervals."""
    next_at_s = beat_at_s + interval_s * max(0, math.floor((now_s - beat_at_s) / interval_s) + 1)
    return next_at_s if next_at_s > now_s else next_at_s + interval_s  # the division may have been rounded up
