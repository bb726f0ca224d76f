"""Finds a rank that does more between its steps than the others, so that all of them wait for it."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.ranks.rank_comparison import straggling
from wellfed.units import show_ms


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if one rank spends more time between its steps, and the others wait for it."""
    found = straggling(evidence, "host_straggler")
    if found is None:
        return None
    host_ms, usual_ms = found.ms("host")
    text = (
        f"between two steps it takes {show_ms(host_ms)}, rank {found.typical['rank']} {show_ms(usual_ms)}. Callbacks, "
        "loggers and hooks run then: make those cheaper that run on this rank alone"
    )
    return found.finding("host_straggler", text, {"host_ms": host_ms})
