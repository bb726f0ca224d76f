"""Finds that validations take a large part of the run."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.gains.pauses import distance, pauses, rarer
from wellfed.explain.diagnosis.thresholds import VALIDATION_FRAC

_KNOB = "trainer.validate_every_steps"
_WANTED_FRAC = 0.03
"""Acceptable share of the wall time."""


def check(evidence: Evidence, least_frac: float = VALIDATION_FRAC) -> Finding | None:
    """Returns a finding if they take at least ``least_frac`` of the time, however few there are."""
    spent = pauses(evidence, "validate")
    if spent is None or spent.frac < least_frac:
        return None
    text = spent.describe("validation")
    figures = {"validation_frac": spent.frac, "validations": spent.times, "validation_s": spent.each_s}
    every, when = distance(evidence, _KNOB, spent.times)
    wanted = min(rarer(every, spent.frac / _WANTED_FRAC), evidence.record.steps) if every else 0
    if spent.times == 1 or not every or wanted <= every:
        text = f"{text}. A smaller validation split takes less; so does a longer run."
        return Finding("frequent_validation", text, figures, lost_frac=spent.frac)
    # A schedule or early stopping depends on the results of validations.
    uses_results = bool(evidence.value("workload.schedule.monitor")) or "early_stopping" in str(
        evidence.value("callbacks")
    )
    return Finding(
        "frequent_validation",
        f"{text}, one {when}.",
        {**figures, "every_steps": every},
        (f"{_KNOB}={wanted}",),
        changes_learning=uses_results,
        gain=spent.gain(max(1.0, spent.times * every / wanted)),
    )
