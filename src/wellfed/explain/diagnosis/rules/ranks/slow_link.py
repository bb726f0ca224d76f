"""Finds ranks that all spend much of each step on averaging their gradients."""

from __future__ import annotations

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.rank_comparison import compared_ranks, has_phases, ms_of, straggler_of
from wellfed.units import MIB, show_bytes, show_ms, show_percent

_BYTES = 4
"""Bytes of a gradient of a weight in float32."""


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if no rank is slower than the others, and gradients go from rank to rank slowly.

    Backward passes contain the averaging. Their own work is at most `BACKWARD_FACTOR` times the forward pass.
    """
    ranks, process = compared_ranks(evidence), evidence.record.process
    if not ranks or process is None or not has_phases(evidence, ranks) or straggler_of(evidence) is not None:
        return None
    step_ms = sum(one["step_ms_mean"] for one in ranks) / len(ranks)
    forward_ms = max(ms_of(one, "forward") for one in ranks)
    waited_ms = min(ms_of(one, "compute") - ms_of(one, "forward") - ms_of(one, "optimizer") for one in ranks)
    least_ms = waited_ms - limits.BACKWARD_FACTOR * forward_ms
    num_bytes = _BYTES * process["parameter_values"]
    if least_ms < limits.REDUCTION_FRAC * step_ms or num_bytes < limits.REDUCTION_MIB * MIB:
        return None
    gb_per_s = 2 * (len(ranks) - 1) / len(ranks) * num_bytes / 1e6 / least_ms
    if gb_per_s > limits.SLOW_LINK_GB_S:
        return None
    text = (
        f"All {len(ranks)} ranks spend at least {show_ms(least_ms)} of each step of {show_ms(step_ms)} "
        f"({show_percent(least_ms / step_ms)}) on averaging {show_bytes(num_bytes)} of gradients, at "
        f"{gb_per_s:.2g} GB/s or less. The link between them limits the run. More samples a step, or a faster link, "
        "make its share smaller"
    )
    figures = {"reduction_ms": least_ms, "step_ms": step_ms, "gradient_mib": num_bytes / MIB, "gb_per_s": gb_per_s}
    if evidence.value("memory.on_oom") != "retry":
        return Finding("slow_link", f"{text}.", figures, lost_frac=least_ms / step_ms)
    hidden_ms = min(least_ms, (limits.BACKWARD_FACTOR - 1) * forward_ms)
    high = step_ms / (step_ms - hidden_ms)
    gain = Gain((1 + high) / 2, 1.0, high)
    text += ". With memory.on_oom=fail, gradients are averaged while the backward pass still computes"
    return Finding("slow_link", f"{text}.", figures, ("memory.on_oom=fail",), gain=gain, lost_frac=least_ms / step_ms)
