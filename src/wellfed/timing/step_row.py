"""Describes one optimizer step as four shares of its wall time."""

from __future__ import annotations

from typing import NamedTuple


class StepRow(NamedTuple):
    """A row of steps.csv. ``wait + copy + compute + host`` is the time since the end of the step before."""

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
    """The step stood still because its batch was not there yet."""
    copy_ms: float | None
    """Copy to the device that nothing else hid; None on a CPU."""
    compute_ms: float
    """Forward, backward and optimizer; on a GPU from the first of their kernels to the last, so with what the device
    waits in between for a host that launches late."""
    host_ms: float
    """The rest, between two steps: the loop, callbacks, logging."""
    asked_wait_ms: float
    """How long the loop waited when it asked for the batch, hidden or not; decides `ready`."""
    warmup: bool = False
    """First steps and those that compiled or were retried: in the file, not in the figures."""

    @property
    def step_ms(self) -> float:
        """Wall time of the step."""
        return self.wait_ms + (self.copy_ms or 0.0) + self.compute_ms + self.host_ms

    @property
    def ready(self) -> bool:
        """The batch was waiting when it was asked for: at most 0.05 ms, or 1 % of the step."""
        return self.asked_wait_ms <= max(0.05, 0.01 * self.step_ms)
