"""Finds that writing checkpoints takes a large part of the run."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.gains.pauses import distance, pauses, rarer
from wellfed.explain.diagnosis.thresholds import CHECKPOINT_FRAC

_KNOB = "trainer.checkpoint_every_steps"
_WANTED_FRAC = 0.01
"""Acceptable share of the wall time."""


def check(evidence: Evidence, least_frac: float = CHECKPOINT_FRAC) -> Finding | None:
    """Returns a finding if they take at least ``least_frac`` of the time, however few there are."""
    spent = pauses(evidence, "checkpoint")
    files = [event.get("file") for event in evidence.record.events if event["kind"] == "checkpoint"]
    if spent is None or not files or spent.frac < least_frac:
        return None
    text = spent.describe("checkpoint")
    figures = {"checkpoint_frac": spent.frac, "checkpoints": spent.times, "checkpoint_s": spent.each_s}
    num_best = files.count("best.ckpt")
    every, when = distance(evidence, _KNOB, spent.times * (1 - num_best / len(files)))
    wanted = min(rarer(every, spent.frac / _WANTED_FRAC), evidence.record.steps) if every else 0
    # best.ckpt is written after the best validation so far, whatever the knob.
    if not every or wanted <= every or 2 * num_best > len(files):
        return Finding("frequent_checkpoints", f"{text}.", figures, lost_frac=spent.frac)
    left = num_best + max(1.0, (len(files) - num_best) * every / wanted)
    which = "last.ckpt" if num_best else "one"  # best.ckpt is written in addition
    return Finding(
        "frequent_checkpoints",
        f"{text}, {which} {when}. A run that dies loses what it learned since the last.",
        {**figures, "every_steps": every},
        (f"{_KNOB}={wanted}",),
        gain=spent.gain(left * spent.times / len(files)),
    )
