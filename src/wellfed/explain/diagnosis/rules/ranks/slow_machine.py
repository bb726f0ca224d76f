"""Finds a rank whose machine has no core or no disk left for it, so that the others wait for it."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.ranks.rank_comparison import machine_of, straggling


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if one rank has no core, or its machine's disk is slow."""
    found = straggling(evidence, "slow_machine")
    trouble = None if found is None else machine_of(evidence, found)
    if found is None or trouble is None:
        return None
    text, figures, cure = trouble
    return found.finding("slow_machine", f"{text}, so {found.compared()}. {cure}", figures)
