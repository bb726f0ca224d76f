"""Turns marks of the training loop into one row per step, also for a device that works asynchronously.

On a CPU the times are those of the host's clock. On a GPU the host only launches work, so events are recorded on the
compute stream: three in each step, and in some steps one at each change of phase. They are read once the device has
passed them, some steps later, and used again. Nothing waits for them.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # imports torch
    from wellfed.batches import BuildTime

from wellfed.observe.timing.wall import STEPS, Wall

WARMUP_STEPS = 3
"""First steps of a process: allocator, thread pools and caches fill."""
READY_MS, READY_FRAC = 0.05, 0.01
"""Longest wait for a batch that still counts as ready, in ms and as a share of the step; the larger one counts."""
WINDOW_STEPS, WINDOW_S = 64, 0.2
"""Steps, or seconds, after which finished rows are due to be taken."""
FORWARD, BACKWARD, OPTIMIZER, OTHER = range(4)
"""Phases of compute. Other is what belongs to none of the three, such as a user's hooks before the forward pass."""
COMPUTE_PHASES = ("forward", "backward", "optimizer")
"""Names of the phases with columns of their own."""
PHASE_COLUMNS = tuple(f"{clock}{name}_ms" for clock in ("", "device_") for name in COMPUTE_PHASES)
"""Columns of the phases: on the clock of the host, then on that of the device."""
MOST_APART = 16
"""Maximum steps from one whose phases the device times to the next. They are as far apart as the last one had changes
of phase, so that a step has one more event on average; or one step more or less, so that no periodic work is always or
never timed."""
Mark = tuple[int, float]
"""A phase that begins, and when on the clock's ``now_s``."""


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
    """Time for which the step stood still because its batch was not there yet."""
    copy_ms: float | None
    """Copy to the device that no computation hid; None on a CPU."""
    compute_ms: float
    """Forward, backward and optimizer; on a GPU from the first of their kernels to the last. This includes the time
    that the device waits in between for a host that launches late."""
    host_ms: float
    """The rest, between two steps: the loop, callbacks, logging."""
    asked_wait_ms: float
    """Time that the loop waited for the batch, hidden or not; decides `ready`."""
    warmup: bool = False
    """First steps and those that compiled or were retried; they are in the file and not in the figures."""
    build_ms: float | None = None
    """Milliseconds to build the batch, by any process or thread; None if unknown."""
    build_cpu_ms: float | None = None
    """CPU time of the thread that built it."""
    launch_ms: float | None = None
    """Time that the host took to launch forward, backward and optimizer; None on a CPU."""
    slowest_ms: float | None = None
    """Time to read the slowest sample of the batch; None if unknown."""
    slowest_index: int | None = None
    """Index of that sample."""
    forward_ms: float | None = None
    """Time of the host in forward passes, summed over the micro-batches; None if unknown, like the next ones."""
    backward_ms: float | None = None
    """Time of the host in backward passes."""
    optimizer_ms: float | None = None
    """Time of the host from the last gradient to the updated weights: clipping, and the optimizer's step."""
    device_forward_ms: float | None = None
    """The same on the device's clock, as `compute_ms`; None on a CPU and in steps that were not timed."""
    device_backward_ms: float | None = None
    device_optimizer_ms: float | None = None
    copy_ahead_ms: float | None = None
    """Time to copy the batch to the device ahead of the step, beside earlier steps; None if it was not, as on a CPU."""

    @property
    def step_ms(self) -> float:
        """Returns the wall time of the step."""
        return self.wait_ms + (self.copy_ms or 0.0) + self.compute_ms + self.host_ms

    @property
    def ready(self) -> bool:
        """Returns whether the batch was there when it was asked for."""
        return self.asked_wait_ms <= max(READY_MS, READY_FRAC * self.step_ms)


class DeviceEvent(Protocol):
    """Interface of `torch.cuda.Event(enable_timing=True)`."""

    def record(self, stream: Any = None) -> None:
        """Puts a mark on a stream; None = the current one, which torch has to find first."""

    def query(self) -> bool:
        """Returns whether the device has passed the mark."""

    def elapsed_time(self, end_event: DeviceEvent, /) -> float:
        """Returns the milliseconds from this mark to another; the device has passed both."""


_Counts = tuple[int, int, int, int, bool]
"""Step, samples, size of the largest micro-batch, number of micro-batches, and whether the step is warm-up."""
_NOT_BUILT = (None, None, None, None)
_Phases = tuple[float, float, float] | tuple[None, None, None]
_UNKNOWN: _Phases = (None, None, None)
_row: Callable[[tuple[object, ...]], StepRow] = partial(tuple.__new__, StepRow)
"""Makes a row of a tuple: without the call of a function that the class itself needs."""


@dataclass(slots=True)
class _Marks:
    """Marks of a step while the device may still compute it."""

    epoch: int
    previous: DeviceEvent | None
    """End of the previous step."""
    asked_s: float
    got_s: float
    begin: DeviceEvent
    built: BuildTime | None
    copy_ahead_ms: float | None
    early: list[DeviceEvent]
    """Begins and ends of the copies before ``begin``."""
    copied_s: float = 0.0
    copied: DeviceEvent | None = None
    end_s: float = 0.0
    end: DeviceEvent | None = None
    counts: _Counts = (0, 0, 0, 0, False)
    phases_ms: _Phases = _UNKNOWN
    """Times of the host."""
    phases: list[tuple[int, DeviceEvent]] | None = None
    """Begin of each phase on the device; None in a step whose phases it does not time."""
    copies: list[DeviceEvent] = field(default_factory=list)
    """Begins and ends of the copies after it, see `StepClock.copies`."""


def _copied_ms(copies: list[DeviceEvent]) -> float:
    return sum(begin.elapsed_time(end) for begin, end in zip(copies[::2], copies[1::2], strict=True))


class StepClock:
    """Collects the marks of each step: ``ask -> got -> copy_begins -> copied -> end``, in this order, once a step.

    The time between `end` of one step and `ask` of the next is host time. `interrupt` announces a pause in training
    (validation, a checkpoint); the following step is timed from its own `ask`.

    Between ``copied`` and ``end``, each ``mark((phase, now_s()))`` begins a phase of compute. Phases may repeat, as for
    micro-batches; the row has their sums. They are unknown in a step without a mark of a backward pass, or if the
    optimizer begins without one since its latest step: a backward pass was then not seen.
    """

    def __init__(
        self,
        *,
        origin_s: float | None = None,
        now_s: Callable[[], float] = time.monotonic,
        new_event: Callable[[], DeviceEvent] | None = None,
        current_stream: Callable[[], Any] | None = None,
        wall: Wall | None = None,
        first_phase: int = OTHER,
    ) -> None:
        """
        Args:
            current_stream: returns the device's stream, once for all events of a step. By default each event finds its
                own.
            wall: account of the time between the steps, too.
            first_phase: phase from ``copied`` to the first mark.
        """
        self.wall, self._first_phase = wall or Wall(), first_phase
        self.now_s, self._new_event, self._current_stream = now_s, new_event, current_stream
        self._stream: Any = None
        self._marks: list[Mark] = []
        self.mark: Callable[[Mark], None] = self._marks.append if new_event is None else self._mark_on_device
        """Begins a phase. On a CPU this is no Python function, so that a step makes no further calls."""
        self._has_gradients = False
        """A backward pass was marked since the optimizer's latest step, which may be some steps ago."""
        self._untimed_left = 0
        """Steps until the device times phases again."""
        self._random = random.Random(0)  # of its own: training draws nothing from it
        self._spare: list[DeviceEvent] = []
        """Events that were read. A new one would cost as much as recording it."""
        self._origin_s = now_s() if origin_s is None else origin_s
        self._last_end_s: float | None = None
        self._last_end: DeviceEvent | None = None
        self._asked_s = self._got_s = self._begin_s = self._copied_s = 0.0
        self._epoch = 0
        self._built: BuildTime | None = None
        self._is_open = False
        """A step has begun and not ended."""
        self._open: _Marks | None = None
        """Its marks on a device."""
        self._copies: list[DeviceEvent] = []
        """Begins and ends of copies since the previous step or since its own begin."""
        self._pending: deque[_Marks] = deque()
        self._rows: list[StepRow] = []
        self._taken_at_s = self._origin_s

    def time_s(self) -> float:
        """Returns the seconds since the run first started."""
        return self.now_s() - self._origin_s

    def ask(self) -> None:
        """Marks that the loop asks for the next batch."""
        if self.wall.account != STEPS:
            self.wall.switch(STEPS)
        self._asked_s = self.now_s()

    def got(self) -> None:
        """Marks that the loop has the batch on the host."""
        self._got_s = self.now_s()

    def copy_begins(self, epoch: int, built: BuildTime | None = None, copy_ahead_ms: float | None = None) -> None:
        """Marks that the copy to the device is about to be launched; ``built``: what building the batch took;
        ``copy_ahead_ms``: what copying it took if it is on the device already."""
        self._begin_s = self._asked_s if self._last_end_s is None else self._last_end_s
        self._epoch, self._built, self._is_open = epoch, built, True
        if self._new_event is not None:
            if self._current_stream is not None:
                self._stream = self._current_stream()
            early = self._taken_copies()
            if (replaced := self._open) is not None:
                early = replaced.early + early
                self._spare += filter(None, (replaced.begin, replaced.copied))
                self._spare += [event for _, event in replaced.phases or ()]
            if self._last_end is None:  # the time before is not that of a step
                self._spare += early
                early = []
            at = (epoch, self._last_end, self._asked_s, self._got_s)
            self._open = _Marks(*at, self._recorded(), built, copy_ahead_ms, early)

    def copied(self) -> None:
        """Marks that the copy is launched (GPU) or done (CPU); compute follows."""
        self._marks.clear()
        if not self._is_open:
            return
        self._copied_s, marks = self.now_s(), self._open
        if marks is not None:
            if marks.copied is not None:
                self._spare.append(marks.copied)
            marks.copied_s, marks.copied = self._copied_s, self._recorded()
            if not self._untimed_left:
                marks.phases = []

    def copies(self, *, is_done: bool) -> None:
        """Marks begin or end of each copy that others make, on a GPU: after ``copied``, or before ``ask``.

        Host time then lasts up to the first copy after ``copied``, and work between two of these copies is compute. A
        begin without an end is none.
        """
        if self._new_event is None:
            return
        copies, marks = self._copies, self._open
        if len(copies) % 2 == is_done:  # a begin, or an end of one
            copies.append(self._recorded())
            if is_done and marks is not None and len(copies) == 2:
                marks.copied_s = self._copied_s = self.now_s()
        elif not is_done:
            copies[-1].record(self._stream)

    def _taken_copies(self) -> list[DeviceEvent]:
        """Returns begins and ends of the copies so far, and forgets them."""
        copies, self._copies = self._copies, []
        if len(copies) % 2:
            self._spare.append(copies.pop())
        return copies

    def _mark_on_device(self, mark: Mark) -> None:
        self._marks.append(mark)
        marks = self._open
        if marks is not None and marks.phases is not None:
            marks.phases.append((mark[0], self._recorded()))

    def _recorded(self) -> DeviceEvent:
        """Returns an event that is recorded on the stream."""
        assert self._new_event is not None
        event = self._spare.pop() if self._spare else self._new_event()
        event.record(self._stream)
        return event

    def end(self, *, step: int, samples: int, micro_batch: int, num_micro: int, warmup: bool = False) -> bool:
        """Marks that the optimizer step is launched (GPU) or done (CPU).

        Returns whether rows are due to be taken. They may be taken earlier, too.
        """
        if not self._is_open:
            return False
        self._is_open, end_s = False, self.now_s()
        self._last_end_s, marks = end_s, self._open
        phase, since_s, spent_s = self._first_phase, self._copied_s, [0.0, 0.0, 0.0, 0.0]
        has_backward, has_unseen = False, False
        for begun, at_s in self._marks:
            spent_s[phase] += at_s - since_s
            phase, since_s = begun, at_s
            if begun == BACKWARD:
                has_backward = self._has_gradients = True
            elif begun == OPTIMIZER:
                has_unseen, self._has_gradients = has_unseen or not self._has_gradients, False
        spent_s[phase] += end_s - since_s
        phases_ms = _UNKNOWN
        if has_backward and not has_unseen:
            phases_ms = (1e3 * spent_s[0], 1e3 * spent_s[1], 1e3 * spent_s[2])
        if marks is not None:
            self._open = None
            if marks.phases and not warmup:
                apart = min(len(marks.phases), MOST_APART - 1) + self._random.choice((-1, 0, 1))
                self._untimed_left = max(apart, 1) - 1
            elif self._untimed_left:
                self._untimed_left -= 1
            marks.counts, marks.phases_ms = (step, samples, micro_batch, num_micro, warmup), phases_ms
            marks.end_s, marks.end, marks.copies = end_s, self._recorded(), self._taken_copies()
            self._last_end = marks.end
            self._pending.append(marks)
            num_rows = len(self._pending)
        else:
            wait_ms = 1e3 * (self._got_s - self._asked_s)
            compute_ms = 1e3 * (end_s - self._copied_s)
            host_ms = max(0.0, 1e3 * (end_s - self._begin_s) - wait_ms - compute_ms)
            build_ms, build_cpu_ms, *slowest = self._built or _NOT_BUILT
            at = (step, end_s - self._origin_s, self._epoch, samples, micro_batch, num_micro)
            times = (wait_ms, None, compute_ms, host_ms, wait_ms, warmup, build_ms, build_cpu_ms, None)
            self._rows.append(_row((*at, *times, *slowest, *phases_ms, *_UNKNOWN, None)))
            num_rows = len(self._rows)
        return num_rows >= WINDOW_STEPS or end_s - self._taken_at_s >= WINDOW_S

    def interrupt(self) -> None:
        """Marks a pause in training between two steps, whose time belongs to neither."""
        self._last_end_s, self._last_end = None, None

    def rows(self, *, wait: bool = False) -> list[StepRow]:
        """Returns the steps that are finished on the device, oldest first, each once.

        With ``wait`` the device is idle, and all remaining steps are returned.
        """
        found, self._rows, self._taken_at_s = self._rows, [], self.now_s()
        while self._pending:
            end = self._pending[0].end
            if end is not None and not wait and not end.query():
                break
            found.append(self._row_on_device(self._pending.popleft()))
        return found

    def _row_on_device(self, marks: _Marks) -> StepRow:
        """Returns the row of a step by the device's own time line.

        The device stood idle between two steps, at the end of what the host did meanwhile: it waited for a batch.
        In the rest of the gap the host was late.
        """
        assert marks.copied is not None
        assert marks.end is not None
        previous, end, copies = marks.previous, marks.end, marks.copies
        begin, copied, *more = copies or (marks.begin, marks.copied)
        asked_wait_ms = 1e3 * (marks.got_s - marks.asked_s)
        early_ms, more_ms = _copied_ms(marks.early), _copied_ms(more)
        gap_ms = asked_wait_ms if previous is None else max(0.0, previous.elapsed_time(begin) - early_ms)
        copy_ms = early_ms + begin.elapsed_time(copied) + more_ms
        wait_ms = min(gap_ms, asked_wait_ms)
        phase, since, spent_ms = self._first_phase, copied, [0.0, 0.0, 0.0, 0.0]
        spent_ms[phase] -= more_ms
        for begun, event in marks.phases or ():
            spent_ms[phase] += since.elapsed_time(event)
            phase, since = begun, event
            self._spare.append(event)
        spent_ms[phase] += since.elapsed_time(end)
        self._spare += (marks.begin, marks.copied, *marks.early, *copies)
        if previous is not None:
            self._spare.append(previous)
        is_timed = marks.phases and marks.phases_ms is not _UNKNOWN
        device_ms = (spent_ms[0], spent_ms[1], spent_ms[2]) if is_timed else _UNKNOWN
        step, samples, micro_batch, num_micro, warmup = marks.counts
        build_ms, build_cpu_ms, *slowest = marks.built or _NOT_BUILT
        at = (step, marks.end_s - self._origin_s, marks.epoch, samples, micro_batch, num_micro)
        host_ms, launch_ms = gap_ms - wait_ms, 1e3 * (marks.end_s - marks.copied_s)
        times = (wait_ms, copy_ms, sum(spent_ms), host_ms, asked_wait_ms, warmup, build_ms, build_cpu_ms, launch_ms)
        return _row((*at, *times, *slowest, *marks.phases_ms, *device_ms, marks.copy_ahead_ms))
