"""Collects the figures of one rank, and brings those of all ranks to rank 0 while they train."""

from __future__ import annotations

import math
import multiprocessing.process
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import psutil

from wellfed.batches import Delivery, bytes_by_dtype
from wellfed.observe.telemetry.host import cpu_seconds
from wellfed.observe.timing.interval import error_of_mean, half_width, student_t_975
from wellfed.observe.timing.readiness import summarise
from wellfed.observe.timing.step_clock import StepRow
from wellfed.observe.timing.wall import waited_for_a_core_s
from wellfed.record import RankEntry
from wellfed.run.outcome import RankEnded
from wellfed.run.ranks.coordination import OtherRanks
from wellfed.units import mib

EVERY_S = 30.0
"""Seconds between two reports of a rank's figures."""
_LATEST = 10_000
"""Number of latest steps that a report covers. More would hold up the training for longer."""
_MEASURED_EVERY = 8
"""Batches from one whose bytes are counted to the next, since counting visits each tensor."""
_FEWEST_TIMED = 5
"""Minimum number of steps whose phases a device timed, for an interval."""


class BatchSizes:
    """Mean samples and bytes of the batches that this rank has received."""

    def __init__(self) -> None:
        self._batches = self._samples = self._measured = self._bytes = 0

    def add(self, delivery: Delivery) -> None:
        """Counts a batch; padding has no samples."""
        self._batches += 1
        if delivery.is_padding:
            return
        self._samples += delivery.size
        if self._batches % _MEASURED_EVERY == 1:
            self._measured += 1
            self._bytes += sum(bytes_by_dtype(delivery.batch).values())

    @property
    def samples(self) -> float | None:
        """Mean samples of a batch; None without batches."""
        return self._samples / self._batches if self._batches else None

    @property
    def batch_mib(self) -> float | None:
        """Mean MiB of a batch; None without batches."""
        return mib(self._bytes / self._measured) if self._measured else None


class CpuUse:
    """Cores that this rank and its whole machine keep busy, from now on."""

    def __init__(self) -> None:
        self._began_s, self._own_s = time.monotonic(), _own_cpu_s()
        self._busy_s, self._iowait_s = cpu_seconds()
        self._waited_s = waited_for_a_core_s().get(str(os.getpid()))

    def entry(self) -> dict[str, Any]:
        """Returns ``cores``, ``machine_cores``, ``iowait_cores`` and ``core_wait_frac`` of a `RankEntry`."""
        passed_s, (busy_s, iowait_s) = time.monotonic() - self._began_s, cpu_seconds()
        if passed_s <= 0:
            return {}
        idle_s = None if iowait_s is None or self._iowait_s is None else iowait_s - self._iowait_s
        later_s = waited_for_a_core_s().get(str(os.getpid()))
        waited_s = None if later_s is None or self._waited_s is None else later_s - self._waited_s
        return {
            "cores": max(0.0, _own_cpu_s() - self._own_s) / passed_s,
            "machine_cores": max(0.0, busy_s - self._busy_s) / passed_s,
            "iowait_cores": None if idle_s is None else max(0.0, idle_s) / passed_s,
            "core_wait_frac": None if waited_s is None else max(0.0, waited_s) / passed_s,
        }


class RankFigures:
    """Reports of this rank to rank 0, which records the latest report of each rank. A single rank reports nothing.

    A report never waits for another rank. It is left in the store of rank 0, where the last one stays when its rank
    has ended.

    Args:
        about: rank, node and GPU; None = this rank trains alone.
        rows: returns the rows of the steps so far.
        peak_gib: returns the peak of memory of this rank so far.
        record: records the figures of all ranks.
    """

    def __init__(
        self,
        about: dict[str, Any] | None,
        others: OtherRanks,
        *,
        rows: Callable[[], Sequence[StepRow]],
        peak_gib: Callable[[], float | None],
        record: Callable[[Sequence[RankEntry]], None],
    ) -> None:
        self._about, self._others = about, others
        self._rows, self._peak_gib, self._record = rows, peak_gib, record
        self.begin()

    def begin(self) -> None:
        """Starts to measure, as training begins."""
        self._sizes, self._cpu, self._due_s = BatchSizes(), CpuUse(), time.monotonic() + EVERY_S

    @property
    def on_batch(self) -> Callable[[Delivery], None] | None:
        """Function to call with each batch; None for a single rank."""
        return None if self._about is None else self._sizes.add

    def stepped(self) -> bool:
        """Reports after a step if `EVERY_S` has passed. Returns whether rank 0 has recorded new figures."""
        if self._about is None or time.monotonic() < self._due_s:
            return False
        self.report()
        return self.record_latest()

    def report(self) -> None:
        """Leaves the present figures of this rank for rank 0."""
        self._due_s = time.monotonic() + EVERY_S
        if (own := self._own()) is not None:
            with suppress(RankEnded):  # the training finds it out by itself
                self._others.publish(_KIND, own)

    def record_latest(self) -> bool:
        """Records, on rank 0, the latest report of each rank. Returns whether there was any."""
        found: list[RankEntry] = []
        if self._about is not None:
            with suppress(RankEnded):
                found = self._others.latest(_KIND)
        if found:
            self._record(found)
        return bool(found)

    def compare(self) -> None:
        """Records the figures of each rank at the end of training. All ranks must call it.

        Raises:
            RankEnded: a rank has failed. Its last report is recorded by `record_latest`.
        """
        if self._about is not None:
            self.report()
            of_ranks = self._others.all_gather(f"{_KIND} at the end", self._own())
            self._record([one for one in of_ranks if one is not None])

    def _own(self) -> RankEntry | None:
        """Returns the figures of this rank so far; None before the first step after the warm-up."""
        rows = self._rows()
        rows = list(islice(rows, max(0, len(rows) - _LATEST), None))
        found = None if self._about is None else summarise(rows)
        if found is None:
            return None
        return {  # type: ignore[return-value]  # keys from several places
            **(self._about or {}),
            "host": socket.gethostname(),
            "host_cores": os.cpu_count() or 1,
            **{name: getattr(found, name) for name in _OF_SUMMARY},
            "steps": found.steps,
            "samples": self._sizes.samples,
            "batch_mib": self._sizes.batch_mib,
            **half_widths_ms(rows),
            "launch_ms": found.launch_ms_p50,
            "build_ms": found.build_ms_mean,
            "build_cpu_frac": found.build_cpu_frac,
            "peak_gib": self._peak_gib(),
            **self._cpu.entry(),
        }


_KIND = "figures of ranks"
_OF_SUMMARY = (
    *("wait_frac", "copy_frac", "compute_frac", "host_frac", "step_ms_mean", "readiness_frac"),
    *("forward_frac", "backward_frac", "optimizer_frac"),
)


def half_widths_ms(rows: Sequence[StepRow]) -> dict[str, float | None]:
    """Returns ``between_half_ms`` and ``work_half_ms`` of a `RankEntry`; None with too few steps.

    A device times the phases of some steps, so their error is added to that of the rest.
    """
    kept = [row for row in rows if not row.warmup]
    between_ms = [row.wait_ms + (row.copy_ms or 0.0) + row.host_ms for row in kept]
    on_device = any(row.copy_ms is not None for row in kept)
    phases_ms = [
        forward_ms + (optimizer_ms or 0.0)
        for row in kept
        for forward_ms, optimizer_ms in [
            (row.device_forward_ms, row.device_optimizer_ms) if on_device else (row.forward_ms, row.optimizer_ms)
        ]
        if forward_ms is not None
    ]
    between_half_ms = work_half_ms = half_width(between_ms, [1.0] * len(kept))
    if len(phases_ms) == len(kept):
        own_ms = [sum(parts) for parts in zip(between_ms, phases_ms, strict=True)]
        work_half_ms = half_width(own_ms, [1.0] * len(kept))
    elif between_half_ms is not None and len(phases_ms) >= _FEWEST_TIMED:
        phases_half_ms = student_t_975(len(phases_ms) - 1) * error_of_mean(phases_ms)
        work_half_ms = math.hypot(between_half_ms, phases_half_ms)
    return {"between_half_ms": between_half_ms, "work_half_ms": work_half_ms}


def _own_cpu_s() -> float:
    """Returns the CPU seconds of this process, of its children that have ended, and of its live data workers."""
    found = os.times()
    total_s = found.user + found.system + found.children_user + found.children_system
    for child in tuple(getattr(multiprocessing.process, "_children", ())):
        with suppress(psutil.Error, TypeError):
            times = psutil.Process(child.pid).cpu_times()
            total_s += times.user + times.system
    return total_s
