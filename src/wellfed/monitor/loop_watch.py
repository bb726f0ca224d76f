"""Reads GPUs and host during a training loop, in threads, and times its steps by marks of the loop."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

from wellfed.explain.diagnosis.curves.curve_verdict import utilisation_of
from wellfed.explain.diagnosis.thresholds import FEWEST_OF_CARD
from wellfed.monitor.board import Curve
from wellfed.monitor.curve_file import rows_of
from wellfed.monitor.loop_summary import LoopSummary
from wellfed.observe.hardware.detect import machine
from wellfed.observe.hardware.torch_cuda import torch_cuda
from wellfed.observe.loggers.csv_table import CsvTable
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.sampler import Sampler
from wellfed.observe.telemetry.series import HOST, Phase, Sample
from wellfed.observe.timing.readiness import summarise
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.record.entries import EventKind

_KEPT_STEPS = 100_000
"""Number of latest steps that the figures cover."""
_MOST_NOTES = 5
_MOST_UNSENT = 1_000
"""Maximum number of rounds of readings that wait for the loggers. Beyond it the oldest are dropped."""


class LoopSteps:
    """Times the steps of a loop by its marks. Only one thread may set them."""

    def __init__(self, origin_s: float, progress: Progress) -> None:
        self._origin_s, self._progress = origin_s, progress
        self._gpu: int | None = None
        """GPU whose events time the steps; None = the host's clock does."""
        self.clock = StepClock(origin_s=origin_s)
        self.timed: deque[StepRow] = deque(maxlen=_KEPT_STEPS)
        self.number = 0
        """Number of steps done."""
        self.unknown = {"wait_frac"}
        """Figures of `LoopSummary.unknown` that the loop has not marked."""

    def ask(self) -> None:
        """Marks that the loop requests its next batch."""
        self.unknown.discard("wait_frac")
        self.clock.ask()

    def got(self) -> None:
        """Marks that the loop has the batch."""
        self.clock.got()
        self.clock.copy_begins(0)

    def copied(self) -> None:
        """Marks that the batch is on the device or being copied; compute follows."""
        self.clock.copied()

    def done(self) -> None:
        """Marks that a step is launched (GPU) or done (CPU)."""
        self.number += 1
        is_warmup = self.number <= WARMUP_STEPS
        self.clock.end(step=self.number, samples=1, micro_batch=1, num_micro=1, warmup=is_warmup)
        self._progress.step_done(self.number)
        self.timed += self.clock.rows()

    def use_events(self) -> None:
        """Times further steps by device events, if the loop has begun to use a device through torch."""
        if self._gpu is None and self.number <= WARMUP_STEPS and (gpu := gpu_in_use()) is not None:
            self._gpu, self.clock = gpu, device_clock(self._origin_s, gpu)

    def finish(self) -> None:
        """Waits for the device to pass all steps."""
        if self._gpu is not None:
            sys.modules["torch"].cuda.synchronize(self._gpu)
            self.timed += self.clock.rows(wait=True)

    def means_since(self, number: int) -> dict[str, float]:
        """Returns ``step/wait_ms`` and so on of the timed steps after this one, without those that are unknown."""
        rows = list(islice(reversed(self.timed), self.number - number))
        means = {}
        for part in ("wait", "copy", "compute", "host"):
            values = [getattr(row, f"{part}_ms") for row in rows]
            if values and None not in values and f"{part}_frac" not in self.unknown:
                means[f"step/{part}_ms"] = fmean(values)
        return means


class LoopWatch:
    """Readings and steps of one loop, from `start` to `stop`."""

    def __init__(
        self,
        *,
        interval_s: float,
        table: CsvTable | None = None,
        origin_s: float | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        """
        Args:
            table: gets one row per reading, as of `open_csv_for`.
            origin_s: monotonic time that counts as 0; None = now.
            only: numbers of the GPUs to watch; None = all that CUDA shows this process.
        """
        self.origin_s = time.monotonic() if origin_s is None else origin_s
        self._interval_s, self._table, self._only = interval_s, table, only
        self._progress = Progress(time_s=self.time_s)
        self.steps = LoopSteps(self.origin_s, self._progress)
        self._sampler: Sampler | None = None
        self._lock = threading.Lock()
        self._curves: defaultdict[int, Curve] = defaultdict(Curve)
        """Utilisation of each GPU in training, or at any time if no training was marked."""
        self._has_trained = False
        self.unsent: deque[Sequence[Sample]] = deque(maxlen=_MOST_UNSENT)
        """Rounds of readings for the loggers."""
        self._gpus: list[int] = []
        self._notes: list[str] = []
        self._cores = 1.0
        self.num_workers: int | None = None
        """Workers of the DataLoader that feeds the loop."""

    def time_s(self) -> float:
        """Returns the seconds since the origin."""
        return time.monotonic() - self.origin_s

    def start(self) -> None:
        """Starts reading. Listing the GPUs takes milliseconds, unless the driver is stuck."""
        facts = machine(torch_cuda() if uses_cuda() else None)
        self._cores = facts.cpu_quota_cores
        gpus = [gpu for gpu in facts.gpus if self._only is None or gpu.index in self._only]
        self._gpus = [gpu.index for gpu in gpus]
        if not gpus:
            self._notes.append(f"No GPU is watched (NVML: {facts.nvml_problem or 'none is used'}).")
        elif not uses_cuda():  # so that its numbers are those of the environment
            self._notes += [warning for warning in facts.warnings if warning.startswith("NVML: ")]
        if any(gpu.is_simulated for gpu in facts.gpus):
            self._notes.append("A simulated GPU: figures of speed and utilisation are of no real card.")
        self._sampler = Sampler(
            self._take, self._event, interval_s=self._interval_s, progress=self._progress, time_s=self.time_s
        )
        self._sampler.watch(gpus)
        self._sampler.__enter__()

    def stop(self) -> None:
        """Ends the readings; waits at most a second for one in progress."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.__exit__(None, None, None)
        if self._table is not None:
            self._table.flush()

    def enter(self, phase: Phase) -> None:
        """Marks that the loop begins or ends training. Time in between counts to no step."""
        self.steps.clock.interrupt()
        if phase != self._progress.phase:
            self._progress.enter(phase)
        if phase == "train" and not self._has_trained:
            with self._lock:
                self._has_trained = True
                self._curves.clear()

    def fed_by(self, loader: object) -> None:
        """Records the loader's number of workers, if it has one."""
        workers = getattr(loader, "num_workers", None)
        self.num_workers = workers if isinstance(workers, int) else None

    def note(self, text: str) -> None:
        """Adds a remark to the summary."""
        self._notes.append(text)

    def summary(self) -> LoopSummary:
        """Returns the figures so far."""
        with self._lock:
            found = {gpu: utilisation_of(*curve.arrays()) for gpu, curve in sorted(self._curves.items())}
        levels = {gpu: level for gpu, level in found.items() if level is not None and level.num >= FEWEST_OF_CARD}
        return LoopSummary(
            summarise(self.steps.timed),
            frozenset(self.steps.unknown),
            levels,
            tuple(gpu for gpu in self._gpus if gpu not in levels),
            self.num_workers,
            self._cores,
            tuple(self._notes),
        )

    def _take(self, samples: Sequence[Sample]) -> None:
        with self._lock:
            for one in samples:
                is_counted = one.phase == "train" or not self._has_trained
                if one.gpu != HOST and is_counted and "util_pct" in one.values:
                    self._curves[one.gpu].add(one.time_s, one.values["util_pct"])
        self.unsent.append(samples)
        if self._table is not None:
            self._table.append(*rows_of(samples))

    def _event(self, kind: EventKind, **facts: Any) -> None:
        if "message" in facts and len(self._notes) < _MOST_NOTES:
            of = f"GPU {facts['gpu']}: " if "gpu" in facts else ""
            self._notes.append(f"{of}{facts['message']}")


def used_gpus() -> set[int]:
    """Returns the numbers of the GPUs on which torch has held memory in this process; all if it does not count that."""
    if not uses_cuda():
        return set()
    cuda = sys.modules["torch"].cuda
    numbers = range(cuda.device_count())
    try:
        return {one for one in numbers if cuda.memory_stats_as_nested_dict(one)["reserved_bytes"]["all"]["peak"]}
    except (RuntimeError, KeyError):  # an allocator of the script's own
        return {*numbers}


def gpu_in_use() -> int | None:
    """Returns the number of torch's current GPU if it is among `used_gpus`, else their first; None without any."""
    used = used_gpus()
    current = sys.modules["torch"].cuda.current_device() if used else None
    return current if current in used else min(used, default=None)


def device_clock(origin_s: float, gpu: int, current_stream: Callable[[], Any] | None = None) -> StepClock:
    """Returns a clock with events of this GPU, whichever is the current one: an event on another GPU would take memory
    there, and time no work. ``current_stream``: as `StepClock` takes it; by default the GPU's current one."""
    cuda = sys.modules["torch"].cuda
    stream = current_stream or partial(cuda.current_stream, gpu)
    return StepClock(origin_s=origin_s, new_event=partial(cuda.Event, enable_timing=True), current_stream=stream)


def uses_cuda() -> bool:
    """Returns whether this process has begun to use CUDA through torch. Imports nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
