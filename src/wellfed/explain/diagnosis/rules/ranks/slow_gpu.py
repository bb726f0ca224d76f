"""Finds a rank whose card is slower than those of the others, so that they wait for it."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.rank_comparison import straggling
from wellfed.explain.diagnosis.rank_troubles import card_trouble
from wellfed.units import show_ms


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if clocks, power, heat or another process slow the card of one rank."""
    found = straggling(evidence, "slow_gpu")
    trouble = None if found is None else card_trouble(evidence, found.rank, found.typical)
    if found is None or trouble is None:
        return None
    text, figures = trouble
    if found.part != "compute":
        slow_ms, usual_ms = found.ms(found.part)
        text += (
            f". Its {found.part} takes {show_ms(slow_ms)} of a step, that of rank {found.typical['rank']} "
            f"{show_ms(usual_ms)}"
        )
    return found.finding("slow_gpu", f"{text}. No setting of a run changes that: look at that card", figures)
