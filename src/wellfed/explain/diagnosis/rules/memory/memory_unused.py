"""Finds unused device memory while the run does extra work to save memory."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.gains.device_load import DeviceLoad, device_load
from wellfed.explain.diagnosis.gains.memory_room import has_run_out, memory_frac, merge
from wellfed.explain.diagnosis.rules.compute import tensor_cores_idle
from wellfed.explain.diagnosis.thresholds import LEAST_DEVICE_GAIN, MEMORY_USED_FRAC, SM_FULL_FRAC
from wellfed.units import show_gib, show_percent

_RECOMPUTED_FRAC = 0.25
"""Share of recomputation in forward and backward: one forward pass of four."""


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if features could be kept on the device, activations kept, or micro-batches merged.
    `small_batch` reports split steps that leave the card half empty, this rule those that leave it less than full."""
    load, used = device_load(evidence), memory_frac(evidence)
    if load is None or used is None or used >= MEMORY_USED_FRAC or has_run_out(evidence):
        return None
    way_out = _way_out(evidence, load)
    if way_out is None:
        return None
    why, change, gain = way_out
    peak, budget = evidence.record.memory["measured_peak_gib"], evidence.record.memory.get("budget_gib") or 0.0
    return Finding(
        "memory_unused",
        f"{show_percent(used)} of the GPU memory budget is used at most ({show_gib(peak)} of {show_gib(budget)}), "
        f"while {why}.",
        {"memory_frac": used, "full_frac": load.full_frac},
        change,
        gain=gain,
    )


def _way_out(evidence: Evidence, load: DeviceLoad) -> tuple[str, tuple[str, ...], Gain | None] | None:
    """Returns what saves memory in this run, the overrides without it, and their gain."""
    # Only if requested: the plan keeps features on the device if they fit. A trained encoder has no fixed features.
    features = evidence.record.plan.get("memory.features")
    by_stage = evidence.value("memory.stages") is not None
    if (
        not by_stage
        and features is not None
        and features["source"] == "set"
        and features["value"] in ("cache_host", "dynamic")
    ):
        return "features are kept off the device", ("memory.features=cache",), None
    if evidence.value("memory.checkpoint_activations") is True:
        least, most = (1 / (1 - share * load.busy_frac) for share in (_RECOMPUTED_FRAC, 1.2 * _RECOMPUTED_FRAC))
        return "activations are computed twice", ("memory.checkpoint_activations=false",), Gain(least, 1.0, most)
    merged = merge(evidence)
    if merged is None or load.limit is not None or (load.sm_frac is not None and load.full_frac >= SM_FULL_FRAC):
        return None
    if tensor_cores_idle.check(evidence) is not None:  # the larger loss is reported first
        return None
    gain = merged.gain(load)
    why = f"each step is split into {merged.parts_before} micro-batches"
    if load.sm_frac is None:  # the load of the card is unknown
        return why, merged.change, None
    return None if gain.factor < LEAST_DEVICE_GAIN else (f"{why} that don't fill the card", merged.change, gain)
