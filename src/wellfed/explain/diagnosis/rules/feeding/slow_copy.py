"""Finds copies to the GPU that steps wait for."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.gains.device_load import launch_ms
from wellfed.explain.diagnosis.script_words import is_script
from wellfed.explain.diagnosis.thresholds import COPY_FRAC, FEWEST_STEPS
from wellfed.units import MIB, show_bytes, show_percent

_AHEAD = 2
"""Number of batches copied ahead, as in the plan. It hides a copy as long as a step."""
_LATENCY_MS, _SLOWEST_GB_S = 0.5, 0.02
"""Longest start and lowest rate of a copy, with much room: pageable memory goes over PCIe at 1 GB/s and more. Something
else holds up what takes longer."""


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if a step waits for its copy, which could overlap with the previous step."""
    copy = evidence.copy_frac
    if copy <= COPY_FRAC or evidence.steps.num_measured < FEWEST_STEPS or evidence.steps.mean_ms is None:
        return None
    copy_ms, mib = copy * evidence.steps.mean_ms, evidence.record.loading.get("batch_mib")
    num_copies = _copies(evidence)
    figures: Figures = {"copy_frac": copy, "copy_ms": copy_ms}
    text = f"{show_percent(copy)} of each step is copying its batch to the GPU"
    if mib:
        figures |= {"batch_mib": mib, "copy_gb_per_s": num_copies * mib * MIB / 1e6 / copy_ms}
        text += f": {show_bytes(num_copies * mib * MIB)} in {copy_ms:.2f} ms, {figures['copy_gb_per_s']:.2g} GB/s"
        is_simulated = any(gpu.get("is_simulated") for gpu in evidence.record.machine.get("gpus") or ())
        if not is_simulated and copy_ms > num_copies * (_LATENCY_MS + mib * MIB / 1e6 / _SLOWEST_GB_S):
            text += (
                ". So small a copy takes microseconds: something else holds it up, such as other programs on this GPU "
                "(nvidia-smi shows them)"
            )
            return Finding("slow_copy", f"{text}.", figures, lost_frac=copy)
    change, whys = [], []
    if evidence.value("loader.pin_memory") is False and evidence.value("loader.backend") != "own":
        change.append("loader.pin_memory=true")
        whys.append("its memory is not page-locked")
    if not evidence.value("loader.device_prefetch"):
        change.append(f"loader.device_prefetch={_AHEAD}")
        whys.append("nothing is copied ahead")
    if not change:
        text += (
            ", and copies run ahead of the step already. Only smaller batches go over faster: uint8 or int16 in the "
            "batch, converted to floats on the device (on_device)"
        )
        return Finding("slow_copy", f"{text}.", figures, lost_frac=copy)
    return Finding("slow_copy", f"{text}; {' and '.join(whys)}.", figures, tuple(change), gain=_hidden(copy, evidence))


def _copies(evidence: Evidence) -> int:
    """Returns the batches that are copied for a step. A script that accumulates gradients copies each by itself."""
    parts = evidence.steps.column("num_micro")
    return int(np.median(parts)) if is_script(evidence.record) and len(parts) else 1


def _hidden(copy: float, evidence: Evidence) -> Gain:
    """Returns the gain of copies beside the step, limited by copies and launching where they take longer."""
    launched_frac = (launch_ms(evidence) or 0.0) / (evidence.steps.mean_ms or 1.0)
    best = 1 / (1 - min(copy, 0.99))
    factor = max(1.0, min(best, 1 / copy, 1 / max(launched_frac, 0.01)))
    return Gain(factor, 1 + 0.5 * (factor - 1), best)
