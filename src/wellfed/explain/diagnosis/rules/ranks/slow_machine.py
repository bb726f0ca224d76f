"""Finds a rank whose machine has no core or no disk left for it, so that the others wait for it."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.rank_comparison import machine_of, straggling
from wellfed.units import show_ms

_NAMES = {"wait": "waiting for data", "host": "the time between two steps"}


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if other programs take the cores or the disk of one rank's machine."""
    found = straggling(evidence, "slow_machine")
    trouble = None if found is None else machine_of(evidence, found)
    if found is None or trouble is None:
        return None
    text, figures = trouble
    slow_ms, usual_ms = found.ms(found.part)
    what = _NAMES.get(found.part, f"the {found.part}")
    text += (
        f". There {what} takes {show_ms(slow_ms)} of a step, on rank {found.typical['rank']} {show_ms(usual_ms)}. "
        "End what else runs on that machine, or leave it out"
    )
    return found.finding("slow_machine", text, figures)
