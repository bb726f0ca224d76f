"""Finds a rank that computes more slowly than the others, without a cause that its figures show."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.ranks.rank_comparison import straggling
from wellfed.explain.diagnosis.ranks.rank_troubles import clock_mhz, others_memory


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if one rank computes longer, and the others wait for it in their backward pass."""
    found = straggling(evidence, "compute_straggler")
    if found is None:
        return None
    slow_ms, usual_ms = found.ms(found.part)
    figures: Figures = {"slow_ms": slow_ms, "usual_ms": usual_ms}
    remark = others_memory(evidence, found.rank, found.typical)
    is_read = clock_mhz(evidence, found.rank) is not None and clock_mhz(evidence, found.typical) is not None
    seen = "Its batches, its machine and its card show" if is_read else "Its batches and its machine show"
    cause = f"{seen} no cause: look for work that the model does on this rank alone"
    if not is_read and found.rank["gpu"] is not None:
        cause += ", and at its card, which was not read"
    if remark:
        cause = f"{remark}. Or the model does work on this rank alone"
    return found.finding("compute_straggler", f"{found.compared()}. {cause}", figures)
