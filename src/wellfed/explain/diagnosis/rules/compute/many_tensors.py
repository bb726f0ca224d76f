"""Notes models whose parameters are many small tensors."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.thresholds import MANY_TENSORS, SMALL_TENSOR, WORKS_FRAC


def check(evidence: Evidence) -> Finding | None:
    """Returns a note if thousands of small tensors are trained, each of which costs a step some calls."""
    process, time = evidence.record.process, evidence.record.time
    if process is None or time is None or process["parameter_tensors"] < MANY_TENSORS:
        return None
    number, mean = process["parameter_tensors"], process["parameter_values"] / process["parameter_tensors"]
    if mean > SMALL_TENSOR or time["compute_frac"] < WORKS_FRAC:
        return None
    text = (
        f"The model trains {number:,} tensors of {mean:,.0f} values on average. Gradients and optimizer handle each by "
        "itself, at a cost that hardly depends on its size. Adam, AdamW and SGD of torch are fused, so they update all "
        "in one call (unless workload.optimizer.fused=false); fewer and larger parameters save the gradients' share."
    )
    return Finding("many_tensors", text, {"parameter_tensors": number, "values_per_tensor": mean}, is_note=True)
