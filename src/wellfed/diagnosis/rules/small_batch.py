"""Finds steps whose passes are too small for the card, with memory left for larger ones."""

from __future__ import annotations

from wellfed.diagnosis.device_load import device_load
from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding, Gain
from wellfed.diagnosis.memory_room import has_run_out, memory_frac, merge
from wellfed.diagnosis.thresholds import LEAST_DEVICE_GAIN, MEMORY_USED_FRAC
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """Where merging micro-batches, or a larger batch, would fill the card."""
    load, used = device_load(evidence), memory_frac(evidence)
    if load is None or used is None or load.limit not in ("launches", "small kernels"):
        return None
    full = show_percent(load.full_frac)
    figures: dict[str, float | int | str] = {"full_frac": load.full_frac, "memory_frac": used}
    merged = merge(evidence)
    if merged is not None:
        factor = min(merged.factor, 1 / load.full_frac)
        if factor < LEAST_DEVICE_GAIN:
            return None
        said = (
            f"Each step is split into {merged.parts_before} micro-batches of {int(evidence.column('micro_batch')[-1])}"
            f" that fill {full} of the GPU, and {show_percent(used)} of its memory budget is used: it holds them in "
            f"{merged.parts}, for the same step."
        )
        figures |= {"num_micro": merged.parts_before, "num_micro_that_suffice": merged.parts}
        gain = Gain(factor, 1 + 0.5 * (factor - 1), max(factor, merged.factor))
        return Finding("small_batch", said, figures, merged.change, gain=gain)
    # A step that is not split can only grow by what it learns from, and launches are cheaper to save.
    effective = evidence.value("workload.effective_batch_size")
    if load.limit == "launches" or not effective or used >= MEMORY_USED_FRAC or has_run_out(evidence):
        return None
    factor = min(2.0, 1 / load.full_frac)
    return Finding(
        "small_batch",
        f"A step of {effective} samples fills {full} of the GPU and {show_percent(used)} of its memory budget: its "
        "kernels are too small for the card. A step with more samples would take hardly longer.",
        figures | {"effective_batch_size": effective},
        (f"workload.effective_batch_size={2 * effective}", "memory.micro_batch=null", "memory.accumulate=null"),
        changes_learning=True,
        gain=Gain(factor, 1.0, 2.0),
    )
