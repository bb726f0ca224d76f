"""Turns marks of the training loop into one row per step, also for a device that works asynchronously.

On a CPU the host's clock gives all times. On a GPU the host only launches work. So three events per step are recorded
on the compute stream, and read some steps later, when the device has passed them. Nothing waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # imports torch
    from wellfed.batches import BuildTime

from wellfed.observe.timing.wall import STEPS, Wall

WARMUP_STEPS = 3
"""Number of first steps of a process, in which allocator, thread pools and caches fill."""


class StepRow(NamedTuple):
    """A row of steps.csv. ``wait + copy + compute + host`` is the time since the end of the previous step."""

    step: int
    """Optimizer steps done, counted from 1 over the whole run."""
    time_s: float
    """Seconds since the run first started, at the end of the step."""
    epoch: int
    samples: int
    """Samples of this step over all ranks."""
    micro_batch: int
    num_micro: int
    wait_ms: float
    """Milliseconds that the step waited for its batch."""
    copy_ms: float | None
    """Copy to the device that no computation hid; None on a CPU."""
    compute_ms: float
    """Forward, backward and optimizer. On a GPU from their first to their last kernel, with idle time in between."""
    host_ms: float
    """The rest, between two steps: the loop, callbacks, logging."""
    asked_wait_ms: float
    """Milliseconds that the loop waited for the batch, even if the device was busy; decides `ready`."""
    warmup: bool = False
    """First steps, and steps that compiled or were retried. Excluded from the figures."""
    build_ms: float | None = None
    """Milliseconds to build the batch, by any process or thread; None if unknown."""
    build_cpu_ms: float | None = None
    """CPU milliseconds of the thread that built it."""
    launch_ms: float | None = None
    """Milliseconds that the host took to launch forward, backward and optimizer; None on a CPU."""
    slowest_ms: float | None = None
    """Milliseconds to read the slowest sample of the batch; None if unknown."""
    slowest_index: int | None = None
    """Index of that sample."""

    @property
    def step_ms(self) -> float:
        """Wall time of the step."""
        return self.wait_ms + (self.copy_ms or 0.0) + self.compute_ms + self.host_ms

    @property
    def ready(self) -> bool:
        """Whether the batch was waiting when requested: after at most 0.05 ms, or 1 % of the step."""
        return self.asked_wait_ms <= max(0.05, 0.01 * self.step_ms)


class DeviceEvent(Protocol):
    """Interface of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Puts a mark on the current stream."""

    def query(self) -> bool:
        """Returns whether the device has passed the mark."""

    def elapsed_time(self, end_event: DeviceEvent, /) -> float:
        """Returns the milliseconds from this mark to another; both must be passed."""


@dataclass(slots=True)
class _Marks:
    """Marks of a step while the device may still compute it."""

    epoch: int
    begin_s: float
    """End of the previous step."""
    previous: DeviceEvent | None
    asked_s: float
    got_s: float
    begin: DeviceEvent | None
    built: BuildTime | None
    copied_s: float = 0.0
    copied: DeviceEvent | None = None
    end_s: float = 0.0
    end: DeviceEvent | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class StepClock:
    """Collector of the marks of each step: ``ask -> got -> copied -> end``, in this order, once a step.

    Time from `end` to the next `ask` is host time. `interrupt` announces a gap in training (validation, a checkpoint);
    the next step is then timed from its own `ask`.
    """

    def __init__(
        self,
        *,
        origin_s: float | None = None,
        now_s: Callable[[], float] = time.monotonic,
        new_event: Callable[[], DeviceEvent] | None = None,
        wall: Wall | None = None,
    ) -> None:
        """``wall``: also accounts for the time between steps."""
        self.wall = wall or Wall()
        self._now_s, self._new_event = now_s, new_event
        self._origin_s = now_s() if origin_s is None else origin_s
        self._last_end_s: float | None = None
        self._last_end: DeviceEvent | None = None
        self._open: _Marks | None = None
        self._asked_s = self._got_s = 0.0
        self._pending: deque[_Marks] = deque()

    def time_s(self) -> float:
        """Returns the seconds since the run first started."""
        return self._now_s() - self._origin_s

    def ask(self) -> None:
        """Marks that the loop requests the next batch."""
        self.wall.switch(STEPS)
        self._asked_s = self._now_s()

    def got(self) -> None:
        """Marks that the loop has the batch on the host."""
        self._got_s = self._now_s()

    def copy_begins(self, epoch: int, built: BuildTime | None = None) -> None:
        """Marks that the copy to the device is about to be launched; ``built``: time to build the batch."""
        begin_s = self._asked_s if self._last_end_s is None else self._last_end_s
        self._open = _Marks(epoch, begin_s, self._last_end, self._asked_s, self._got_s, self._mark(), built)

    def copied(self) -> None:
        """Marks that the copy is launched (GPU) or done (CPU); compute follows."""
        if self._open is not None:
            self._open.copied_s = self._now_s()
            self._open.copied = self._mark()

    def end(self, *, step: int, samples: int, micro_batch: int, num_micro: int, warmup: bool = False) -> None:
        """Marks that the optimizer step is launched (GPU) or done (CPU)."""
        marks, self._open = self._open, None
        if marks is None:
            return
        facts = {"step": step, "samples": samples, "micro_batch": micro_batch, "num_micro": num_micro, "warmup": warmup}
        marks.facts, marks.end_s, marks.end = facts, self._now_s(), self._mark()
        self._last_end_s, self._last_end = marks.end_s, marks.end
        self._pending.append(marks)

    def interrupt(self) -> None:
        """Marks a pause in training between two steps, whose time belongs to neither."""
        self._last_end_s, self._last_end = None, None

    def rows(self, *, wait: bool = False) -> Iterator[StepRow]:
        """Yields the steps that the device has finished, oldest first, each once. With ``wait`` yields all remaining
        steps, and the device must be idle."""
        while self._pending:
            end = self._pending[0].end
            if end is not None and not wait and not end.query():
                return
            yield self._row(self._pending.popleft())

    def _mark(self) -> DeviceEvent | None:
        if self._new_event is None:
            return None
        event = self._new_event()
        event.record()
        return event

    def _row(self, marks: _Marks) -> StepRow:
        asked_wait_ms = 1e3 * (marks.got_s - marks.asked_s)
        copy_ms: float | None
        launch_ms: float | None = None
        if marks.begin is None or marks.copied is None or marks.end is None:
            wait_ms, copy_ms = asked_wait_ms, None
            compute_ms = 1e3 * (marks.end_s - marks.copied_s)
            host_ms = max(0.0, 1e3 * (marks.end_s - marks.begin_s) - wait_ms - compute_ms)
        else:
            # The device was idle for `gap` between two steps. The part in which the loop waited for a batch is wait
            # time, the rest is host time.
            gap_ms = asked_wait_ms if marks.previous is None else max(0.0, marks.previous.elapsed_time(marks.begin))
            wait_ms = min(gap_ms, asked_wait_ms)
            host_ms = gap_ms - wait_ms
            copy_ms = marks.begin.elapsed_time(marks.copied)
            compute_ms = marks.copied.elapsed_time(marks.end)
            launch_ms = 1e3 * (marks.end_s - marks.copied_s)
        built = marks.built
        return StepRow(
            **marks.facts,
            time_s=marks.end_s - self._origin_s,
            epoch=marks.epoch,
            wait_ms=wait_ms,
            copy_ms=copy_ms,
            compute_ms=compute_ms,
            host_ms=host_ms,
            asked_wait_ms=asked_wait_ms,
            build_ms=None if built is None else built.wall_ms,
            build_cpu_ms=None if built is None else built.cpu_ms,
            launch_ms=launch_ms,
            slowest_ms=None if built is None else built.slowest_ms,
            slowest_index=None if built is None else built.slowest_index,
        )
