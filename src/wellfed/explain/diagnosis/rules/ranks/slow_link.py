"""Finds ranks that all spend much of each step on averaging their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.ranks.rank_comparison import compared_ranks, has_phases, ms_of
from wellfed.record import RankEntry
from wellfed.units import MIB, show_bytes, show_ms, show_percent

_BYTES = 4
"""Bytes of a gradient of a weight in float32, for records without ``parameter_bytes``."""
_PASSES = 3
"""Own work of a step over its forward pass, where the backward pass takes twice as long."""


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the backward passes of all ranks, which contain the averaging, take very long.

    The straggler's own pass, in which it waits for no rank, is the shortest. Own work is up to `BACKWARD_FACTOR` times
    the forward pass in most models. It is more with gradients of a large embedding or of a gradient penalty, so the
    finding is a note unless an override may help. If each rank's own work varies from step to step, the shortest pass
    contains waiting, too: then it is a note as well.
    """
    ranks, process = compared_ranks(evidence), evidence.record.process
    if not ranks or process is None or not has_phases(evidence, ranks):
        return None
    step_ms = sum(one["step_ms_mean"] for one in ranks) / len(ranks)
    forward_ms = max(ms_of(one, "forward") for one in ranks)
    most_ms = min(ms_of(one, "backward") for one in ranks) - limits.BACKWARD_FACTOR * forward_ms
    num_bytes = process.get("parameter_bytes", _BYTES * process["parameter_values"])
    if most_ms < limits.REDUCTION_FRAC * step_ms or num_bytes < limits.REDUCTION_MIB * MIB:
        return None
    gb_per_s = 2 * (len(ranks) - 1) / len(ranks) * num_bytes / 1e6 / most_ms
    if gb_per_s > limits.SLOW_LINK_GB_S:
        return None
    text = (
        f"All {len(ranks)} ranks spend up to {show_ms(most_ms)} of each step of {show_ms(step_ms)} "
        f"({show_percent(most_ms / step_ms)}) on averaging {show_bytes(num_bytes)} of gradients ({gb_per_s:.2g} GB/s). "
        "Their backward passes take that much longer than three forward passes. If the model does not explain it, the "
        "link between them limits the run. More samples a step, or a faster link, make its share smaller"
    )
    figures: Figures = {"reduction_ms": most_ms, "step_ms": step_ms, "gradient_mib": num_bytes / MIB}
    figures["gb_per_s"] = gb_per_s
    varies = _varies(ranks, most_ms)
    if varies:
        text += ". So do steps of alike length: here each rank's work varies, and all wait for the longest"
    if varies is not False or evidence.value("memory.on_oom") != "retry":
        return Finding("slow_link", f"{text}.", figures, is_note=True)
    hidden_ms = min(most_ms, (limits.BACKWARD_FACTOR - 1) * forward_ms)
    high = step_ms / (step_ms - hidden_ms)
    text += ". With memory.on_oom=fail, gradients are averaged while the backward pass still computes"
    return Finding(
        "slow_link",
        f"{text}.",
        figures,
        ("memory.on_oom=fail",),
        gain=Gain((1 + high) / 2, 1.0, high),
        lost_frac=most_ms / step_ms / 2,  # in the middle between none and all
    )


def _varies(ranks: Sequence[RankEntry], most_ms: float) -> bool | None:
    """Returns whether waiting for whichever rank takes longest in a step may take as long as averaging seems to.

    None if that is unknown.

    The expected maximum of normal values is their mean and some standard deviations more (Blom 1958). Those of the
    passes are estimated from the own work that is timed.
    """
    number = len(ranks)
    above = NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
    for one in ranks:
        half_ms, steps = one.get("work_half_ms"), one.get("phase_steps") or one.get("steps")
        if half_ms is None or steps is None:
            return None
        if above * _PASSES * half_ms / 2 * math.sqrt(steps) >= most_ms:
            return True
    return False
