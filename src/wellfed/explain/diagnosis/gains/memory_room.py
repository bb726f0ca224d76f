"""Computes how much device memory a run has left, and how far its micro-batches may grow."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Gain
from wellfed.explain.diagnosis.gains.device_load import DeviceLoad
from wellfed.explain.diagnosis.thresholds import TENSOR_IDLE_FRAC
from wellfed.ranks import largest_share

_TENSOR_FULL_FRAC, _SM_FULL_FRAC = 0.5, 0.9
"""Activity of tensor cores and multiprocessors from which larger passes do not help."""


@dataclass(frozen=True)
class Merge:
    """Fewer and larger micro-batches for the same optimizer step."""

    micro_batch: int
    micro_batch_before: int
    parts_before: int
    parts: int

    @property
    def factor(self) -> float:
        """Passes before over passes after."""
        return self.parts_before / self.parts

    def gain(self, load: DeviceLoad) -> Gain:
        """Returns the gain. The fixed cost of a pass (launches, reading weights, idle multiprocessors) is paid less
        often, until the card is full."""
        full = min(1.0, load.full_frac / _SM_FULL_FRAC)
        if load.tensor_frac is not None and load.tensor_frac >= TENSOR_IDLE_FRAC:
            full = min(full, load.tensor_frac / _TENSOR_FULL_FRAC)
        factor = min(self.factor, 1 / full)
        return Gain(factor, 1 + 0.3 * (factor - 1), self.factor)

    @property
    def change(self) -> tuple[str, ...]:
        """Overrides; the effective batch stays the same."""
        return f"memory.micro_batch={self.micro_batch}", "memory.accumulate=null"


def memory_frac(evidence: Evidence) -> float | None:
    """Returns the share of the budget at the run's peak; None without a budget, as on a CPU."""
    budget, peak = evidence.record.memory.get("budget_gib"), evidence.record.memory.get("measured_peak_gib")
    return None if not budget or peak is None or not evidence.on_gpu else peak / budget


def has_run_out(evidence: Evidence) -> bool:
    """Returns whether device memory ran out at least once."""
    kinds = {event["kind"] for event in evidence.record.events}
    return evidence.record.status == "oom" or bool(kinds & {"oom", "step_down", "thrash", "ladder"})


def merge(evidence: Evidence) -> Merge | None:
    """Returns the largest micro-batch that surely fits, as peaks grow at most in proportion; None if none is larger."""
    effective, used = evidence.value("workload.effective_batch_size"), memory_frac(evidence)
    parts, micro = evidence.steps.column("num_micro"), evidence.steps.column("micro_batch")
    if not effective or not used or not len(parts) or not len(micro) or has_run_out(evidence):
        return None
    share = largest_share(int(effective), evidence.num_ranks)
    usual = int(np.median(micro))  # an epoch's last batch may be smaller
    before = ceil(share / usual)
    if before < 2 or before != np.median(parts) or (times := int(0.9 / used)) < 2:
        return None
    size = min(share, usual * times)
    return Merge(ceil(share / ceil(share / size)), usual, before, ceil(share / size))
