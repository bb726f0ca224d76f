"""Finds a rank that computes more slowly than the others, without a cause that its figures show."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.rank_comparison import straggling
from wellfed.units import show_ms

_NAMES = {"forward": "forward pass", "optimizer": "optimizer"}


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if one rank computes longer, and the others wait for it in their backward pass."""
    found = straggling(evidence, "compute_straggler")
    if found is None:
        return None
    slow_ms, usual_ms = found.ms(found.part)
    text = (
        f"its {_NAMES.get(found.part, found.part)} takes {show_ms(slow_ms)} of a step, that of rank "
        f"{found.typical['rank']} {show_ms(usual_ms)}. Its batches, its machine and its card show no cause: look for "
        "work that the model does on this rank alone"
    )
    return found.finding("compute_straggler", text, {"slow_ms": slow_ms, "usual_ms": usual_ms})
