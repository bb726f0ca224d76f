"""Finds matrix products in full float32 on a card whose tensor cores are idle."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.gains.device_load import BF16_SINCE, FP16_SINCE, DeviceLoad, capability_of, device_load
from wellfed.explain.diagnosis.thresholds import SM_HALF_FRAC, TENSOR_IDLE_FRAC
from wellfed.units import show_percent

_RATIO, _LEAST_RATIO, _MOST_RATIO = 4.0, 2.0, 16.0
"""Speed-up of products on tensor cores over float32 that real kernels reach: usual, lowest, highest. Ratios of peak
rates: 4 for an RTX 4090, 16 for an A100, 15 for an H100 (NVIDIA's datasheets)."""
_DRAM_FRAC = 0.25
"""Assumed share of time for memory traffic beside the products, if not measured."""


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the card has work that its tensor cores could do."""
    load, capability = device_load(evidence), capability_of(evidence)
    if load is None or load.limit is not None or capability is None or load.full_frac < SM_HALF_FRAC:
        return None
    has_tf32 = capability >= BF16_SINCE
    if evidence.value("gpu.precision") != "32-true" or capability < FP16_SINCE:
        return None
    if has_tf32 and evidence.value("gpu.tf32") is not False:
        return None  # products use tensor cores already
    tensor = load.tensor_frac
    if tensor is not None and tensor >= TENSOR_IDLE_FRAC:
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
