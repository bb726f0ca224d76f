"""Finds a rank whose batches are larger than those of the others, so that they wait for it."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.ranks.rank_comparison import named_rank, share_factor, straggling
from wellfed.units import MIB, show_bytes, show_count


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if more samples, or longer ones, make one rank slower than the others.

    Where its time can't be told from waiting, the finding is a note.
    """
    found = straggling(evidence, "uneven_shares")
    if found is None:
        return None
    rank, other = found.rank, found.typical
    samples, usual = rank.get("samples") or 0.0, other.get("samples") or 0.0
    size, usual_size = rank.get("batch_mib") or 0.0, other.get("batch_mib") or 0.0
    shown = f"{show_bytes(size * MIB)}, those of rank {other['rank']} {show_bytes(usual_size * MIB)}"
    if samples and usual and samples / usual >= share_factor(rank, other):
        shown = f"{show_count(samples)} samples, those of rank {other['rank']} {show_count(usual)}"
        cure = "give all ranks as many samples"
    else:
        cure = "group samples by length, so that all ranks of a step get alike ones"
    figures: Figures = {"samples": samples, "usual_samples": usual, "batch_mib": size, "usual_batch_mib": usual_size}
    if found.part == "compute":
        text = (
            f"The batches of {named_rank(rank)} have {shown} on average, so others may wait for it: {cure}. How long "
            "they wait is unknown, since waiting can't be told from computing here."
        )
        return Finding("uneven_shares", text, found.figures | figures, is_note=True)
    return found.finding("uneven_shares", f"its batches have {shown} on average: {cure}", figures)
