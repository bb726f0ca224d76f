"""The number of workers that keep up with the steps: one rule for the plan and for the findings. No torch."""

from __future__ import annotations

from dataclasses import dataclass

WAIT_FRAC = 0.05
"""Maximum share of a step spent waiting for data that counts as fed (torch-tb-profiler 0.4.3)."""
BUILD_WAITS_FRAC = 0.5
"""CPU time over wall time of building a batch, below which it is mostly waiting (disk, network, service)."""
MOST_WORKERS = 32
"""Maximum number of workers that is planned by measured times, or advised."""


@dataclass(frozen=True)
class Work:
    """Time and CPU time of a step and its batch."""

    step_ms: float
    """Milliseconds of a step without waiting for data."""
    build_ms: float
    """Milliseconds that one worker needs for a batch."""
    cpu_ms: float
    """CPU milliseconds of a step and of building its batch, in all processes."""
    cores: float
    """Cores for this work."""

    def period_ms(self, workers: int, slack: float = 1.0) -> float:
        """Returns the milliseconds from step to step; ``slack``: factor on the times of building."""
        return max(self.step_ms, slack * self.build_ms / workers, slack * self.cpu_ms / self.cores)

    def workers_needed(self, most: int) -> int:
        """Returns the smallest sufficient number of workers, if all batches take equally long."""
        enough_ms = self.period_ms(most) / (1 - WAIT_FRAC)
        return next(count for count in range(1, most + 1) if self.period_ms(count) <= enough_ms)

    def workers_advised(self, most: int, own_cores: float, *, waits_outside: bool) -> int:
        """Returns the workers to have: one more than needed since batches take unequal times, unless it lacks a core.

        Args:
            own_cores: cores of the machine for one device.
            waits_outside: whether building mostly waits for something other than a core.
        """
        needed = self.workers_needed(most)
        has_core = waits_outside or needed + 2 <= own_cores
        return min(needed + 1, most) if has_core else needed
