"""Finds a rank that needs more memory than the others."""

from __future__ import annotations

from statistics import median

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.ranks.rank_comparison import named_rank
from wellfed.explain.diagnosis.thresholds import UNEVEN_MEMORY_FACTOR, UNEVEN_MEMORY_GIB
from wellfed.units import show_gib


def check(evidence: Evidence) -> Finding | None:
    """Returns a note on the rank whose peak of memory is far above that of the others."""
    peaks = {one["rank"]: one["peak_gib"] for one in evidence.record.ranks if one["peak_gib"] is not None}
    if len(peaks) < 2:
        return None
    highest = max(peaks, key=lambda rank: peaks[rank])
    peak, usual = peaks.pop(highest), median(peaks.values())
    if peak < UNEVEN_MEMORY_FACTOR * usual or peak - usual < UNEVEN_MEMORY_GIB:
        return None
    rank = next(one for one in evidence.record.ranks if one["rank"] == highest)
    named = named_rank(rank)
    text = (
        f"{named[0].upper()}{named[1:]} needs {show_gib(peak)} of memory, the others {show_gib(usual)}. All ranks have "
        "one micro-batch, so memory runs out on this rank first: look for tensors that it alone keeps, or for longer "
        "samples."
    )
    figures: Figures = {"rank": highest, "host": rank.get("host", ""), "peak_gib": peak, "usual_gib": usual}
    return Finding("uneven_memory", text, figures, is_note=True)
