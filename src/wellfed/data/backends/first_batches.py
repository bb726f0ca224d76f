"""Describes the first batches: plain data without torch, for planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wellfed.data.worker_count import Work


@dataclass(frozen=True)
class BackendTime:
    """Time of a training loop with one backend."""

    period_ms: float
    """Mean time of a step in the faster of two passes, including the wait for its batch."""
    num_workers: int = 0
    """Workers in that trial."""


@dataclass(frozen=True)
class FirstBatches:
    """Measurements of the first batches."""

    build_ms: float
    """Median time to build a batch, without the first batch."""
    batch_bytes: int
    """Bytes of one rank's batch."""
    num_batches: int
    """Batches per epoch, the maximum that a loader holds."""
    step_ms: float | None = None
    """Mean time of a warm step of the model on these batches; None = not measured."""
    timed: Mapping[str, BackendTime] = field(default_factory=dict)
    """Times by backend; empty if the time to build a batch was enough to decide."""
    failed: tuple[str, ...] = ()
    build_cpu_ms: float | None = None
    """CPU time to build a batch; None = as its time."""
    step_cpu_ms: float | None = None
    """CPU time of a step, in all threads; None = as its time."""

    def work(self, cores: float) -> Work | None:
        """Returns what a step and its batch take with so many cores; None if no step was measured."""
        if self.step_ms is None:
            return None
        build_cpu_ms = self.build_ms if self.build_cpu_ms is None else self.build_cpu_ms
        step_cpu_ms = self.step_ms if self.step_cpu_ms is None else self.step_cpu_ms
        return Work(self.step_ms, self.build_ms, build_cpu_ms + step_cpu_ms, cores)
