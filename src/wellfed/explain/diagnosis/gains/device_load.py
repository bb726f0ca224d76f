"""Computes how busy the card was within the steps of a run, what limited it, and how much of its memory is left.

On a GPU the time of a step runs from its first kernel to its last, gaps for a late host included. So a step may leave
the card idle without waiting for data. The time that the host took to launch the step shows the cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence, once
from wellfed.explain.diagnosis.finding import Gain
from wellfed.explain.diagnosis.gains.feeding import is_starved
from wellfed.ranks import largest_share
from wellfed.record.entries import SynchronisationEntry

DeviceLimit = Literal["synchronisation", "launches", "bandwidth", "small kernels"]
"""Limit of a card: waits of the host for it, slow launches, memory bandwidth, or kernels that fill a part of it."""


FP16_SINCE, BF16_SINCE = 7.0, 8.0
"""Capabilities from which tensor cores support float16, and bfloat16 and TF32 (CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class DeviceLoad:
    """Shares of the compute time of a run; None where the card lacks the figure."""

    busy_frac: float
    """Share with any kernel running, as the driver counts it. An upper bound on a real card."""
    sm_frac: float | None
    """Share of active multiprocessors; None without GPM."""
    tensor_frac: float | None
    dram_frac: float | None
    launch_frac: float | None
    """Time the host took to launch a step over the compute time. Near 1 the host was never ahead. None if the host may
    have waited for other ranks within it."""
    synchronisations: tuple[SynchronisationEntry, ...]
    """Lines that wait for the device at least in every other step, the most frequent first."""

    @property
    def full_frac(self) -> float:
        """Use of the whole card: active multiprocessors, or else the share of time with any kernel."""
        return self.busy_frac if self.sm_frac is None else min(self.busy_frac, self.sm_frac)

    @property
    def without_synchronisation(self) -> Gain:
        """Gain without synchronisation: host and card run in parallel, and the slower one sets the pace."""
        high = 1 / max(self.full_frac, 1 - self.busy_frac)
        return Gain(1 / max(self.busy_frac, 1 - self.busy_frac), 1.0, max(high, 1.0))

    @property
    def limit(self) -> DeviceLimit | None:
        """The limit to remove; None if the figures show none."""
        idles = self.busy_frac < limits.BUSY_FRAC
        if self.launch_frac is not None and self.launch_frac >= limits.LAUNCH_FRAC:  # the host is never ahead
            wins = self.without_synchronisation.factor >= limits.LEAST_GAIN
            if self.synchronisations and wins and self.busy_frac >= limits.HARDLY_BUSY_FRAC:
                return "synchronisation"
            if idles or self.full_frac < limits.SM_EMPTY_FRAC:
                return "launches"
        if (
            self.dram_frac is not None
            and self.dram_frac >= limits.DRAM_FRAC
            and (self.tensor_frac or 0.0) < limits.TENSOR_FRAC
        ):
            return "bandwidth"
        if not idles and self.full_frac < limits.SM_HALF_FRAC:
            return "small kernels"
        return None


@once
def device_load(evidence: Evidence) -> DeviceLoad | None:
    """Returns the load of the least busy card. None on a CPU, with too few readings, late batches or `DataParallel`."""
    record, steps, telemetry, time = evidence.record, evidence.steps, evidence.telemetry, evidence.record.time
    if time is None or not evidence.on_gpu or steps.num_measured < limits.FEWEST_STEPS or is_starved(evidence):
        return None
    if any(event["kind"] == "data_parallel" for event in record.events) or time["compute_frac"] <= 0:
        return None

    def within_steps(name: str) -> float | None:
        # The median ignores first readings, which belong to the start.
        readings = [telemetry.curve(name, gpu) for gpu in telemetry.gpus]
        medians = [float(np.median(one)) / 100 for one in readings if len(one) >= limits.FEWEST_OF_CARD]
        return min(1.0, min(medians) / time["compute_frac"]) if medians else None

    util, sm = within_steps("util_pct"), within_steps("sm_active_pct")
    busy = sm if util is None else util  # an instance of a card (MIG) has no utilisation
    if busy is None:
        return None
    may_wait = evidence.num_ranks > 1 and evidence.value("memory.on_oom") == "retry"
    launch_ms, took_ms = (
        steps.median("launch_ms"),
        (steps.median("copy_ms") or 0.0) + (steps.median("compute_ms") or 0.0),
    )
    lines = sorted(record.synchronisations or [], key=lambda one: -one["per_step"])
    return DeviceLoad(
        busy_frac=max(busy, 0.01),
        sm_frac=None if sm is None else max(sm, 0.01),
        tensor_frac=within_steps("tensor_active_pct"),
        dram_frac=within_steps("dram_active_pct"),
        launch_frac=None if launch_ms is None or may_wait or not took_ms > 0 else launch_ms / took_ms,
        synchronisations=tuple(one for one in lines if one["per_step"] >= limits.SYNCHRONISATIONS_A_STEP),
    )


def used_cards(evidence: Evidence) -> list[dict[str, Any]]:
    """Returns the cards that the run trained on: those in its telemetry, else the first ``trainer.devices``."""
    cards = evidence.record.machine.get("gpus") or []
    watched = [card for card in cards if str(card.get("index", "")) in evidence.record.gpus]
    return watched or cards[: int(evidence.value("trainer.devices") or 1)]


def capability_of(evidence: Evidence) -> float | None:
    """Returns the lowest compute capability of the cards that the run trained on; None if unknown."""
    found = (card.get("capability") for card in used_cards(evidence))
    return min((float(one) for one in found if one), default=None)


_TENSOR_FULL_FRAC, _SM_FULL_FRAC = 0.5, 0.9
"""Activity of tensor cores and multiprocessors from which larger passes do not help."""


@dataclass(frozen=True)
class Merge:
    """Fewer and larger micro-batches for the same optimizer step."""

    micro_batch: int
    micro_batch_before: int
    parts_before: int
    parts: int

    def gain(self, load: DeviceLoad) -> Gain:
        """Returns the gain: the fixed cost of a pass (launches, weights) is paid less often, until it is full."""
        full = min(1.0, load.full_frac / _SM_FULL_FRAC)
        if load.tensor_frac is not None and load.tensor_frac >= limits.TENSOR_IDLE_FRAC:
            full = min(full, load.tensor_frac / _TENSOR_FULL_FRAC)
        most = self.parts_before / self.parts
        factor = min(most, 1 / full)
        return Gain(factor, 1 + 0.3 * (factor - 1), most)

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
    return evidence.record.status == "oom" or bool(kinds & {"oom", "step_down", "ladder"})


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
