"""Finds what limits the compute time of steps: launches, memory bandwidth, small kernels, clocks, a trend."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain, found
from wellfed.explain.diagnosis.gains.device_load import (
    BF16_SINCE,
    FP16_SINCE,
    DeviceLoad,
    capability_of,
    device_load,
    memory_frac,
    merge,
    used_cards,
)
from wellfed.explain.diagnosis.words import Figures
from wellfed.observe.hardware.profiles import lacks_tensor_cores
from wellfed.record.entries import SynchronisationEntry


def launch_bound(evidence: Evidence) -> Finding | None:
    """Returns a finding if the host is never ahead of the card, though it waits for nothing itself."""
    load = device_load(evidence)
    if load is None or load.limit != "launches" or load.launch_frac is None:
        return None
    if small_batch(evidence) is not None:  # fewer passes launch less, at no cost
        return None
    high = 1 / load.full_frac
    figures: Figures = {"busy_frac": load.busy_frac, "full_frac": load.full_frac, "launch_frac": load.launch_frac}
    figures |= {"_host_frac": min(load.launch_frac, 1.0), "_places": places(load.synchronisations) or None}
    can_compile = evidence.value("gpu.compile") in ("none", "default") and "gpu.compile" not in evidence.record.refused
    change = ("gpu.compile=reduce-overhead",) if can_compile else ()
    return found("launch_bound", figures, change, gain=Gain(sqrt(high), 1.0, high))


def memory_bound(evidence: Evidence) -> Finding | None:
    """Returns a finding if the card moves bytes rather than computes."""
    load = device_load(evidence)
    if load is None or load.limit != "bandwidth" or load.dram_frac is None or small_batch(evidence) is not None:
        return None
    change = []
    if evidence.value("gpu.precision") == "32-true" and (capability_of(evidence) or 0) >= BF16_SINCE:
        change.append("gpu.precision=bf16-mixed")
    if evidence.value("gpu.compile") == "none" and "gpu.compile" not in evidence.record.refused:
        change.append("gpu.compile=default")
    is_few = load.full_frac < limits.SM_FULL_FRAC  # weights are read for few samples
    best = 1 / (1 - min(load.dram_frac, 0.9) / 2)
    figures: Figures = {"dram_frac": load.dram_frac, "full_frac": load.full_frac, "tensor_frac": load.tensor_frac}
    figures |= {"_few": is_few, "_many": not is_few}
    gain = Gain(1 + 0.5 * (best - 1), 1.0, best) if change else None
    return found("memory_bound", figures, change, gain=gain, lost_frac=None if change else 0.0)


def small_batch(evidence: Evidence) -> Finding | None:
    """Returns a finding if merging micro-batches would fill the card."""
    load, used, merged = device_load(evidence), memory_frac(evidence), merge(evidence)
    if load is None or used is None or merged is None or load.limit in (None, "synchronisation"):
        return None
    gain = merged.gain(load)
    if gain.factor < limits.LEAST_DEVICE_GAIN:
        return None
    figures: Figures = {"full_frac": load.full_frac, "memory_frac": used, "num_micro": merged.parts_before}
    figures |= {"num_micro_that_suffice": merged.parts, "_size": merged.micro_batch_before}
    figures |= {"_launches": load.limit == "launches", "_busy_frac": load.busy_frac}
    figures |= {"_bytes": load.limit == "bandwidth", "_dram_frac": load.dram_frac}
    figures["_kernels"] = load.limit == "small kernels"
    return found("small_batch", figures, merged.change, gain=gain)


_NAMED = 3


def synchronisation(evidence: Evidence) -> Finding | None:
    """Returns a finding if the host waits for the card, and the card then for the host."""
    load = device_load(evidence)
    if load is None or load.limit != "synchronisation":
        return None
    lines = load.synchronisations
    figures: Figures = {"busy_frac": load.busy_frac, "full_frac": load.full_frac}
    figures |= {"synchronisations_per_step": sum(one["per_step"] for one in lines), "place": lines[0]["place"]}
    return found("synchronisation", {**figures, "_places": places(lines)}, gain=load.without_synchronisation)


def places(lines: Sequence[SynchronisationEntry]) -> str:
    """Returns the most frequent lines as text."""
    text = ", ".join(f"{one['place']} ({how_often(one['per_step'])})" for one in lines[:_NAMED])
    return text + (f" and {len(lines) - _NAMED} lines more" if len(lines) > _NAMED else "")


def how_often(per_step: float) -> str:
    """Returns a frequency as text: ``once a step``."""
    if per_step >= 1.5:
        return f"{per_step:.0f} times a step"
    return "once a step" if per_step > 0.75 else f"every {1 / max(per_step, 1e-3):.0f} steps"


_RATIO, _LEAST_RATIO, _MOST_RATIO = 4.0, 2.0, 16.0
"""Speed-up of products on tensor cores over float32 that real kernels reach: usual, lowest, highest. Ratios of peak
rates: 4 for an RTX 4090, 16 for an A100, 15 for an H100 (NVIDIA's datasheets)."""
_DRAM_FRAC = 0.25
"""Assumed share of time for memory traffic beside the products, if not measured."""


def tensor_cores_idle(evidence: Evidence) -> Finding | None:
    """Returns a finding if the card has work that its tensor cores could do."""
    load, capability = device_load(evidence), capability_of(evidence)
    if load is None or load.limit is not None or capability is None or load.full_frac < limits.SM_HALF_FRAC:
        return None
    if evidence.value("gpu.precision") != "32-true" or capability < FP16_SINCE:
        return None
    if any(lacks_tensor_cores(card.get("name") or "") for card in used_cards(evidence)):
        return None
    has_tf32, tensor = capability >= BF16_SINCE, load.tensor_frac
    if has_tf32 and evidence.value("gpu.tf32") is not False:
        return None  # products use tensor cores already
    if tensor is not None and tensor >= limits.TENSOR_IDLE_FRAC:
        return None
    figures: Figures = {"full_frac": load.full_frac, "capability": capability, "tensor_frac": tensor}
    figures |= {"_busy_frac": load.busy_frac, "_tf32": has_tf32}
    change = ("gpu.precision=bf16-mixed", "gpu.tf32=true") if has_tf32 else ("gpu.precision=16-mixed",)
    least, most = (_gain(load, ratio) for ratio in (_LEAST_RATIO, _MOST_RATIO))
    gain = Gain(_gain(load, _RATIO), 1.0 if tensor is None else least, most)
    return found("tensor_cores_idle", figures, change, case="unread" if tensor is None else "", gain=gain)


def _gain(load: DeviceLoad, ratio: float) -> float:
    """Returns the gain if products take less time, but bytes and launches the same."""
    dram = min(1.0, _DRAM_FRAC if load.dram_frac is None else load.dram_frac)
    return max(1.0, 1 / max(dram + (1 - dram) / ratio, load.launch_frac or 0.0))


def clocks_limited(evidence: Evidence) -> Finding | None:
    """Returns a note on the card that was limited most. No knob changes it."""
    shares = [
        (share, gpu, cause)
        for gpu in evidence.telemetry.gpus
        for cause, name in (("heat", "heat_limited"), ("power", "power_limited"))
        if (share := evidence.telemetry.mean(name, gpu) or 0.0) > limits.LIMITED_FRAC
    ]
    if not shares:
        return None
    share, gpu, cause = max(shares)
    figures: Figures = {"limited_by": cause, "limited_frac": share, "gpu": gpu}
    clocks = evidence.telemetry.curve("sm_clock_mhz", gpu)
    if len(clocks):
        figures |= {"sm_clock_mhz": float(np.mean(clocks)), "sm_clock_max_mhz": float(clocks.max())}
    return found("clocks_limited", figures, is_note=True)


def data_parallel(evidence: Evidence) -> Finding | None:
    """Returns a finding if the model copies itself to other cards in each step."""
    event = next((event for event in evidence.record.events if event["kind"] == "data_parallel"), None)
    if event is None:
        return None
    devices = int(event.get("devices") or 0)
    figures: Figures = {"devices": devices, "_module": event.get("module", "a module of it")}
    if devices < 2:
        return found("data_parallel", figures, case="of_one")
    return found("data_parallel", figures, (f"trainer.devices={devices}", "trainer.strategy=ddp"))


_BLOCKS, _FEWEST = 10, 60
"""Number of parts of a run whose medians must rise, and minimum number of steps."""
_LARGEST_RISE = 0.4
"""Maximum share of the growth in one part. More is a jump, as when others begin to use the machine."""
_LARGEST_FALL = 0.3
"""Maximum fall from one part to the next over the mean rise, for noise of the medians."""


def step_time_trend(evidence: Evidence) -> Finding | None:
    """Returns a finding if the median step of each part of a run took longer than in the part before, by enough and not
    in one jump."""
    samples, times_ms = evidence.steps.column("samples"), evidence.steps.rest_ms
    if len(times_ms) < _FEWEST or clocks_limited(evidence) is not None or _others_rise(evidence):
        return None
    if len(samples) == len(times_ms) and np.all(samples > 0):
        times_ms = times_ms * float(np.mean(samples)) / samples  # the last batch of an epoch may be smaller
    levels = [float(np.median(part)) for part in np.array_split(times_ms, _BLOCKS)]
    first, last, rises = levels[0], levels[-1], np.diff(levels)
    if first <= 0 or last < limits.TREND_FACTOR * first or rises.max() > _LARGEST_RISE * (last - first):
        return None
    if rises.min() < -_LARGEST_FALL * (last - first) / len(rises):
        return None
    lost_frac = max(0.0, 1 - first / float(np.mean(times_ms)))
    figures: Figures = {"first_ms": first, "last_ms": last, "growth_factor": last / first, "lost_frac": lost_frac}
    return found("step_time_trend", figures, lost_frac=lost_frac)


def _others_rise(evidence: Evidence) -> bool:
    """Returns whether other programs, or other ranks, took more and more of the machine."""
    others = evidence.telemetry.taken_cores[np.isfinite(evidence.telemetry.taken_cores)]
    if len(others) < 3:
        return False
    first, *_, last = (float(part.mean()) for part in np.array_split(others, 3))
    return last - first >= limits.OTHERS_FRAC * (evidence.cores or 1.0)
