"""Finds few samples that take very long to load each time, or never come."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.waiting import cause_of_waiting, slow_steps, slow_twice
from wellfed.units import counted, show_duration, show_percent

_NAMED = 5
"""Most that are named."""


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding where the same samples were slow in two epochs, or a note on those that were left out."""
    lost = [event for event in evidence.record.events if event["kind"] == "sample_skipped"]
    if lost:
        indices = [event["index"] for event in lost[:_NAMED] if "index" in event]
        said = (
            f"{counted(len(lost), 'sample')} could not be loaded and {'was' if len(lost) == 1 else 'were'} left out: "
            f"{', '.join(map(str, indices))}. Each cost the run a look for it; loader.skip_ids leaves them out from "
            "the start."
        )
        return Finding("slow_samples", said, {"samples_skipped": len(lost)}, is_note=True)
    waiting = cause_of_waiting(evidence)
    if waiting is None or waiting.cause != "slow_samples":
        return None
    repeated = slow_twice(evidence)
    slow = slow_steps(evidence, waiting.feeding)
    waited_ms = evidence.wait_ms[slow]
    share = float(waited_ms.sum() / evidence.wait_ms.sum())
    named = ", ".join(map(str, sorted(repeated)[:_NAMED]))
    more = f" and {len(repeated) - _NAMED} more" if len(repeated) > _NAMED else ""
    said = (
        f"{show_percent(waiting.frac)} of training waits for data, {show_percent(share)} of that in "
        f"{counted(len(slow), 'step')} of {len(evidence.wait_ms)}, up to {show_duration(waited_ms.max() / 1e3)} each. "
        f"The same samples were slow in more than one epoch: {named}{more}. Look at these samples; loader.skip_ids "
        "leaves them out."
    )
    figures = {
        "slow_steps": len(slow),
        "slowest_wait_ms": float(waited_ms.max()),
        "share_of_waiting_frac": share,
        "samples_slow_twice": len(repeated),
    }
    return Finding("slow_samples", said, figures, lost_frac=waiting.frac * share)
