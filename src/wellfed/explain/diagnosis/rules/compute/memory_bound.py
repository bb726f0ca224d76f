"""Finds steps limited by the bandwidth of the card's memory."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.gains.device_load import BF16_SINCE, capability_of, device_load
from wellfed.explain.diagnosis.rules.compute import small_batch
from wellfed.explain.diagnosis.thresholds import SM_FULL_FRAC
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the card moves bytes rather than computes."""
    load = device_load(evidence)
    if load is None or load.limit != "bandwidth" or load.dram_frac is None or small_batch.check(evidence) is not None:
        return None
    change = []
    if evidence.value("gpu.precision") == "32-true" and (capability_of(evidence) or 0) >= BF16_SINCE:
        change.append("gpu.precision=bf16-mixed")
    if evidence.value("gpu.compile") == "none":
        change.append("gpu.compile=default")
    is_few = load.full_frac < SM_FULL_FRAC  # weights are read for few samples
    few = ", or more samples a step, which changes what is learned" if is_few else ""
    best = 1 / (1 - min(load.dram_frac, 0.9) / 2)
    figures: Figures = {"dram_frac": load.dram_frac, "full_frac": load.full_frac}
    if load.tensor_frac is not None:
        figures["tensor_frac"] = load.tensor_frac
    return Finding(
        "memory_bound",
        f"Reading and writing the card's memory takes {show_percent(load.dram_frac)} of its bandwidth: steps move "
        f"bytes rather than compute{'' if is_few else ', and larger batches would move more bytes in proportion'}. "
        f"Fewer bytes help: kernels joined by torch.compile, bf16, NHWC images (gpu.channels_last){few}.",
        figures,
        tuple(change),
        gain=Gain(1 + 0.5 * (best - 1), 1.0, best) if change else None,
        lost_frac=None if change else 0.0,
    )
