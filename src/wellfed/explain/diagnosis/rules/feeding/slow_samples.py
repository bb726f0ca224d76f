"""Finds a few samples that always take very long to load, or fail to load."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.waiting import latency_of, slow_twice, waiting_for
from wellfed.units import counted

_NAMED = 5


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the same samples were slow in two epochs, or a note on samples that were left out."""
    lost = [event for event in evidence.record.events if event["kind"] == "sample_skipped"]
    if lost:
        indices = [event["index"] for event in lost[:_NAMED] if "index" in event]
        text = (
            f"{counted(len(lost), 'sample')} could not be loaded and {'was' if len(lost) == 1 else 'were'} left out: "
            f"{', '.join(map(str, indices))}. Finding each of them took time; loader.skip_ids leaves them out from "
            "the start."
        )
        return Finding("slow_samples", text, {"samples_skipped": len(lost)}, is_note=True)
    waiting = waiting_for(evidence, "slow_samples")
    if waiting is None:
        return None
    repeated, (text, figures, lost_frac) = slow_twice(evidence), latency_of(evidence, waiting)
    named = ", ".join(map(str, sorted(repeated)[:_NAMED]))
    more = f" and {len(repeated) - _NAMED} more" if len(repeated) > _NAMED else ""
    text += (
        f". The same samples were slow in more than one epoch: {named}{more}. Look at these samples; loader.skip_ids "
        "leaves them out."
    )
    return Finding("slow_samples", text, {**figures, "samples_slow_twice": len(repeated)}, lost_frac=lost_frac)
