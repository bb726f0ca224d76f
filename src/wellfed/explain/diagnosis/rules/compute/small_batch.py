"""Finds steps whose passes are too small for the card, with memory left for larger ones."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.gains.device_load import DeviceLoad, device_load
from wellfed.explain.diagnosis.gains.memory_room import has_run_out, memory_frac, merge
from wellfed.explain.diagnosis.thresholds import LEAST_DEVICE_GAIN, MEMORY_USED_FRAC
from wellfed.units import counted, show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if merging micro-batches, or a larger batch, would fill the card."""
    load, used = device_load(evidence), memory_frac(evidence)
    if load is None or used is None or load.limit in (None, "synchronisation"):
        return None
    figures: Figures = {"full_frac": load.full_frac, "memory_frac": used}
    merged = merge(evidence)
    if merged is not None:
        gain = merged.gain(load)
        if gain.factor < LEAST_DEVICE_GAIN:
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
    if load.limit != "small kernels" or not effective or used >= MEMORY_USED_FRAC or has_run_out(evidence):
        return None
    return Finding(
        "small_batch",
        f"A step of {effective} samples is too small for the GPU: {_use_of(load)}, and {show_percent(used)} of its "
        "memory budget is used. One with more samples would take hardly longer.",
        figures | {"effective_batch_size": effective},
        (f"workload.effective_batch_size={2 * effective}", "memory.micro_batch=null", "memory.accumulate=null"),
        changes_learning=True,
        gain=Gain(min(2.0, 1 / load.full_frac), 1.0, 2.0),
        is_note=True,  # every setting that helps changes what is learned
    )


def _use_of(load: DeviceLoad) -> str:
    """Returns the figure that shows that the card is not full, as text."""
    if load.limit == "launches":
        busy = show_percent(load.busy_frac)
        return f"it is busy for {busy} of the compute time, and waits for Python to launch the rest"
    if load.limit == "bandwidth" and load.dram_frac is not None:
        return f"{show_percent(load.dram_frac)} of its memory's bandwidth goes into reading weights for few samples"
    return f"{show_percent(load.full_frac)} of it is at work"
