"""Finds a rank whose card is slower than those of the others, so that they wait for it."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.ranks.rank_comparison import card_of, straggling


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if power, heat or something else holds down the clock of one rank's card."""
    found = straggling(evidence, "slow_gpu")
    trouble = None if found is None else card_of(evidence, found)
    if found is None or trouble is None:
        return None
    text, figures = trouble
    if found.part != "compute":
        text += f", so {found.compared()}"
    return found.finding("slow_gpu", f"{text}. No setting of a run changes that: look at that card", figures)
