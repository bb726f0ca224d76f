"""Finds few samples that take very long to load, or never come."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.waiting import cause_of_waiting, slow_steps
from wellfed.units import counted, show_duration, show_percent

_NAMED = 5
"""Most that are named."""


def check(evidence: Evidence) -> Finding | None:
    """Where most of the waiting is in few steps, or samples were left out because they did not come in time."""
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
    slow = slow_steps(evidence, waiting.feeding)
    waited_ms = evidence.wait_ms[slow]
    steps = evidence.column("step")[slow].astype(int)
    share = float(waited_ms.sum() / evidence.wait_ms.sum())
    said = (
        f"{show_percent(waiting.frac)} of training waits for data, {show_percent(share)} of that in "
        f"{counted(len(slow), 'step')} of {len(evidence.wait_ms)}, up to {show_duration(waited_ms.max() / 1e3)} each: "
        f"few samples are very slow to load. Steps {_shown(steps)} have them; loader.timeout_s names a sample that "
        "takes longer, loader.skip_ids leaves it out."
    )
    figures = {"slow_steps": len(slow), "slowest_wait_ms": float(waited_ms.max()), "share_of_waiting_frac": share}
    return Finding("slow_samples", said, figures, lost_frac=waiting.frac * share)


def _shown(steps: npt.NDArray[np.int_]) -> str:
    named = ", ".join(str(step) for step in steps[:_NAMED])
    return named if len(steps) <= _NAMED else f"{named} and {len(steps) - _NAMED} more"
