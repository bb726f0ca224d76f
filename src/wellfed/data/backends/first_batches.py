"""Describes the first batches: plain data without torch, for planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wellfed.data.worker_count import BUILD_WAITS_FRAC, Work


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
    timed: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of a step and its batch by backend, in the faster of two passes; empty if not needed."""
    failed: tuple[str, ...] = ()
    build_cpu_ms: float | None = None
    """Median CPU time of the thread that built a batch; None = all of ``build_ms``."""

    @property
    def waits_outside(self) -> bool:
        """Whether building mostly waits for something other than a core, such as a disk."""
        return self.build_cpu_ms is not None and self.build_cpu_ms < BUILD_WAITS_FRAC * self.build_ms

    def work(self, cores: float, slack: float = 1.0) -> Work | None:
        """Returns what a step and its batch take with so many cores; None if no step was measured."""
        if self.step_ms is None:
            return None
        cpu_ms = self.build_ms if self.build_cpu_ms is None else self.build_cpu_ms
        return Work(self.step_ms, slack * self.build_ms, self.step_ms + slack * cpu_ms, cores)
