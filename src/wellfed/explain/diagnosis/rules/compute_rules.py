"""Finds what limits the compute time of steps: launches, memory bandwidth, small kernels, clocks, a trend."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.gains.device_load import (
    BF16_SINCE,
    FP16_SINCE,
    DeviceLoad,
    capability_of,
    device_load,
    has_run_out,
    memory_frac,
    merge,
    used_cards,
)
from wellfed.explain.diagnosis.gains.feeding import knobs
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.observe.hardware.profiles import lacks_tensor_cores
from wellfed.record.entries import SynchronisationEntry
from wellfed.units import counted, show_factor, show_ms, show_percent


def launch_bound(evidence: Evidence) -> Finding | None:
    """Returns a finding if the host is never ahead of the card, though it waits for nothing itself."""
    load = device_load(evidence)
    if load is None or load.limit != "launches" or load.launch_frac is None:
        return None
    if small_batch(evidence) is not None:  # fewer passes launch less, at no cost
        return None
    high = 1 / load.full_frac
    waits = f" The host also waits for the GPU at {places(load.synchronisations)}." if load.synchronisations else ""
    can_compile = evidence.value("gpu.compile") in ("none", "default") and "gpu.compile" not in evidence.record.refused
    return Finding(
        "launch_bound",
        f"The GPU is busy for {show_percent(load.busy_frac)} of the compute time of a step. The host takes "
        f"{show_percent(min(load.launch_frac, 1.0))} of it to run the step's code and launch its kernels, and is never "
        f"ahead.{waits}",
        {"busy_frac": load.busy_frac, "full_frac": load.full_frac, "launch_frac": load.launch_frac},
        ("gpu.compile=reduce-overhead",) if can_compile else (),
        gain=Gain(sqrt(high), 1.0, high),
        advice="Launch less: kernels joined by torch.compile or recorded as a CUDA graph, or fewer and larger tensors "
        "in the model.",
    )


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
    few = ", or more samples a step, which changes what is learned" if is_few else ""
    best = 1 / (1 - min(load.dram_frac, 0.9) / 2)
    figures: Figures = {"dram_frac": load.dram_frac, "full_frac": load.full_frac}
    if load.tensor_frac is not None:
        figures["tensor_frac"] = load.tensor_frac
    return Finding(
        "memory_bound",
        f"Reading and writing the card's memory takes {show_percent(load.dram_frac)} of its bandwidth: steps move "
        f"bytes rather than compute{'' if is_few else ', and larger batches would move more bytes in proportion'}.",
        figures,
        tuple(change),
        gain=Gain(1 + 0.5 * (best - 1), 1.0, best) if change else None,
        lost_frac=None if change else 0.0,
        advice=f"Move fewer bytes: kernels joined by torch.compile, bf16, NHWC images (gpu.channels_last){few}.",
    )


def small_batch(evidence: Evidence) -> Finding | None:
    """Returns a finding if merging micro-batches, or a larger batch, would fill the card."""
    load, used = device_load(evidence), memory_frac(evidence)
    if load is None or used is None or load.limit in (None, "synchronisation"):
        return None
    figures: Figures = {"full_frac": load.full_frac, "memory_frac": used}
    merged = merge(evidence)
    if merged is not None:
        gain = merged.gain(load)
        if gain.factor < limits.LEAST_DEVICE_GAIN:
            return None
        text = (
            f"Each step is split into {merged.parts_before} micro-batches of {merged.micro_batch_before}, too small "
            f"for the GPU: {_use_of(load)}. {show_percent(used)} of its memory budget is used, which holds the same "
            f"step in {counted(merged.parts, 'part')}."
        )
        figures |= {"num_micro": merged.parts_before, "num_micro_that_suffice": merged.parts}
        return Finding("small_batch", text, figures, merged.change, gain=gain)
    # An unsplit step can only grow by more samples, which changes learning. Saving launches and bytes costs less.
    effective = evidence.value("workload.effective_batch_size")
    if load.limit != "small kernels" or not effective or used >= limits.MEMORY_USED_FRAC or has_run_out(evidence):
        return None
    more = (f"workload.effective_batch_size={2 * effective}", "memory.micro_batch=null", "memory.accumulate=null")
    is_refused = "workload.effective_batch_size" in evidence.record.refused
    return Finding(
        "small_batch",
        f"A step of {effective} samples is too small for the GPU: {_use_of(load)}, and {show_percent(used)} of its "
        "memory budget is used. One with more samples would take hardly longer.",
        figures | {"effective_batch_size": effective},
        () if is_refused else (*knobs(evidence), *more),
        changes_learning=True,
        gain=Gain(min(2.0, 1 / load.full_frac), 1.0, 2.0),
        is_note=True,  # every setting that helps changes what is learned
    )


def _use_of(load: DeviceLoad) -> str:
    if load.limit == "launches":
        busy = show_percent(load.busy_frac)
        return f"it is busy for {busy} of the compute time, and waits for Python to launch the rest"
    if load.limit == "bandwidth" and load.dram_frac is not None:
        return f"{show_percent(load.dram_frac)} of its memory's bandwidth goes into reading weights for few samples"
    return f"{show_percent(load.full_frac)} of it is at work"


_NAMED = 3


def synchronisation(evidence: Evidence) -> Finding | None:
    """Returns a finding if the host waits for the card, and the card then for the host."""
    load = device_load(evidence)
    if load is None or load.limit != "synchronisation":
        return None
    lines = load.synchronisations
    return Finding(
        "synchronisation",
        f"The GPU is busy for {show_percent(load.busy_frac)} of the compute time of a step. The host waits for it at "
        f"{places(lines)}, and the GPU then waits for the host to launch the next kernels.",
        {
            "busy_frac": load.busy_frac,
            "full_frac": load.full_frac,
            "synchronisations_per_step": sum(one["per_step"] for one in lines),
            "place": lines[0]["place"],
        },
        gain=load.without_synchronisation,
        advice="Keep such values on the device (no .item(), .cpu(), or `if` on a tensor), and read them every 50 steps "
        "instead of in each.",
    )


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
    has_tf32 = capability >= BF16_SINCE
    if evidence.value("gpu.precision") != "32-true" or capability < FP16_SINCE:
        return None
    if any(lacks_tensor_cores(card.get("name") or "") for card in used_cards(evidence)):
        return None
    if has_tf32 and evidence.value("gpu.tf32") is not False:
        return None  # products use tensor cores already
    tensor = load.tensor_frac
    if tensor is not None and tensor >= limits.TENSOR_IDLE_FRAC:
        return None
    figures: Figures = {"full_frac": load.full_frac, "capability": capability}
    text = "computes in float32 (gpu.precision=32-true)" + (" without TF32" if has_tf32 else "")
    if tensor is None:
        busy = show_percent(load.busy_frac)
        text = f"The GPU is busy for {busy} of the compute time and {text}: its tensor cores are not used"
    else:
        figures["tensor_frac"] = tensor
        at_work = (
            f"{show_percent(load.full_frac)} of the GPU is at work, and {show_percent(tensor)} of its tensor cores"
        )
        text = f"{at_work}: it {text}"
    change = ("gpu.precision=bf16-mixed", "gpu.tf32=true") if has_tf32 else ("gpu.precision=16-mixed",)
    least, most = (_gain(load, ratio) for ratio in (_LEAST_RATIO, _MOST_RATIO))
    gain = Gain(_gain(load, _RATIO), 1.0 if tensor is None else least, most)
    return Finding("tensor_cores_idle", f"{text}.", figures, change, gain=gain)


def _gain(load: DeviceLoad, ratio: float) -> float:
    """Returns the gain if products take less time, but bytes and launches the same."""
    dram = min(1.0, _DRAM_FRAC if load.dram_frac is None else load.dram_frac)
    return max(1.0, 1 / max(dram + (1 - dram) / ratio, load.launch_frac or 0.0))


def clocks_limited(evidence: Evidence) -> Finding | None:
    """Returns a note on the card that was limited most. No knob changes it."""
    found = [
        (share, gpu, cause)
        for gpu in evidence.telemetry.gpus
        for cause, name in (("heat", "heat_limited"), ("power", "power_limited"))
        if (share := evidence.telemetry.mean(name, gpu) or 0.0) > limits.LIMITED_FRAC
    ]
    if not found:
        return None
    share, gpu, cause = max(found)
    figures: Figures = {"limited_by": cause, "limited_frac": share, "gpu": gpu}
    text = f"The clocks of GPU {gpu} were held down by {cause} in {show_percent(share)} of the readings"
    clocks = evidence.telemetry.curve("sm_clock_mhz", gpu)
    if len(clocks):
        figures |= {"sm_clock_mhz": float(np.mean(clocks)), "sm_clock_max_mhz": float(clocks.max())}
        text += f", at {clocks.mean():.0f} MHz on average (at most {clocks.max():.0f} were seen)"
    outside = (
        "cooling, or what else heats that machine" if cause == "heat" else "its power limit (nvidia-smi -q -d POWER)"
    )
    return Finding(
        "clocks_limited", f"{text}. No setting of a run changes that: look at {outside}.", figures, is_note=True
    )


def data_parallel(evidence: Evidence) -> Finding | None:
    """Returns a finding if the model copies itself to other cards in each step."""
    event = next((event for event in evidence.record.events if event["kind"] == "data_parallel"), None)
    if event is None:
        return None
    devices = int(event.get("devices") or 0)
    figures: Figures = {"devices": devices}
    if devices < 2:
        return Finding(
            "data_parallel",
            f"The model contains a torch.nn.DataParallel ({event.get('module', 'a module of it')}): with several "
            "GPUs, one process would copy weights and samples to all of them in each step.",
            figures,
            advice="Take it out; trainer.devices=2 trainer.strategy=ddp gives each GPU a process.",
        )
    text, gain, busy = "", None, evidence.telemetry.util_pct
    if busy is not None and busy > 0:
        figures["util_pct"] = busy
        text = f" The GPU that is idle most is busy for {show_percent(busy / 100)} of the time."
        # Waiting for data, copies and the time between steps have other causes than this GPU being idle.
        computes = 1.0 if evidence.record.time is None else evidence.record.time["compute_frac"]
        high = min(1 / (1 - max(0.0, computes - busy / 100)), devices)
        gain = Gain((1 + high) / 2, 1.0, high)
    return Finding(
        "data_parallel",
        f"One process drives {devices} GPUs with torch.nn.DataParallel. In each step it copies weights and samples to "
        f"them and gathers results, and one Python process launches all kernels.{text} Take DataParallel "
        "out of the model, and let each GPU have a process.",
        figures,
        (f"trainer.devices={devices}", "trainer.strategy=ddp"),
        gain=gain,
    )


_BLOCKS, _FEWEST = 10, 60
"""Number of parts of a run whose medians must rise, and minimum number of steps."""
_LARGEST_RISE = 0.4
"""Maximum share of the growth in one part. More is a jump, as when others begin to use the machine."""
_LARGEST_FALL = 0.3
"""Maximum fall from one part to the next over the mean rise, for noise of the medians."""


def step_time_trend(evidence: Evidence) -> Finding | None:
    """Returns a finding if the steps of each part of a run took longer than those of the part before."""
    samples, times_ms = evidence.steps.column("samples"), evidence.steps.rest_ms
    if len(times_ms) and len(samples) == len(times_ms) and np.all(samples > 0):
        times_ms = times_ms * float(np.mean(samples)) / samples  # the last batch of an epoch may be smaller
    levels = _rising(times_ms)
    if levels is None or clocks_limited(evidence) is not None or _others_rise(evidence):
        return None
    first, last = float(levels[0]), float(levels[-1])
    lost_frac = max(0.0, 1 - first / float(np.mean(times_ms)))
    return Finding(
        "step_time_trend",
        f"Steps take longer and longer, without waiting for data: {show_ms(first)} at the start and {show_ms(last)} at "
        f"the end, {show_factor(last / first)} times as long. That cost {show_percent(lost_frac)} of the steps' time.",
        {"first_ms": first, "last_ms": last, "growth_factor": last / first},
        lost_frac=lost_frac,
        advice="Look for work that grows with each step: a list that the loss goes through, a graph that is never "
        "detached, a log that is read again.",
    )


def _rising(times_ms: Series) -> Series | None:
    """Returns the median of each part if they rise throughout, by enough, and not in one jump; else None."""
    if len(times_ms) < _FEWEST:
        return None
    levels = np.array([np.median(part) for part in np.array_split(times_ms, _BLOCKS)])
    growth, rises = levels[-1] - levels[0], np.diff(levels)
    if levels[0] <= 0 or levels[-1] < limits.TREND_FACTOR * levels[0]:
        return None
    is_even = rises.max() <= _LARGEST_RISE * growth and rises.min() >= -_LARGEST_FALL * growth / len(rises)
    return levels if is_even else None


def _others_rise(evidence: Evidence) -> bool:
    """Returns whether other programs took more and more of the machine."""
    others = evidence.telemetry.others_cores[np.isfinite(evidence.telemetry.others_cores)]
    if len(others) < 3:
        return False
    first, *_, last = (float(part.mean()) for part in np.array_split(others, 3))
    return last - first >= limits.OTHERS_FRAC * (evidence.cores or 1.0)
