"""Finds that validations take a good part of the run."""

from __future__ import annotations

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.pauses import pauses, rarer
from wellfed.diagnosis.thresholds import FEWEST_PAUSES, VALIDATION_FRAC
from wellfed.units import counted, show_duration, show_percent

_KNOB = "trainer.validate_every_steps"
_WANTED_FRAC = 0.03
"""What they may take."""


def check(evidence: Evidence) -> Finding | None:
    """Where they cost more than `VALIDATION_FRAC` of the time."""
    spent = pauses(evidence, "validate")
    every = evidence.value(_KNOB) or evidence.lags.get("epoch")
    if spent is None or not every or spent.times < FEWEST_PAUSES or spent.frac < VALIDATION_FRAC:
        return None
    each_s = spent.total_s / spent.times
    wanted = rarer(every, spent.frac / _WANTED_FRAC)
    when = f"one every {every} steps" if evidence.value(_KNOB) else "one at the end of each epoch"
    return Finding(
        "frequent_validation",
        f"{show_percent(spent.frac)} of the time from the first step to the last went into "
        f"{counted(spent.times, 'validation')} of {show_duration(each_s)}, {when}.",
        {
            "validation_frac": spent.frac,
            "validations": spent.times,
            "validation_s": each_s,
            "every_steps": int(every),
        },
        (f"{_KNOB}={wanted}",),
        changes_learning=_is_learned_from(evidence),
        gain=spent.gain(max(1.0, spent.times * every / wanted)),
    )


def _is_learned_from(evidence: Evidence) -> bool:
    """A schedule or a callback goes by what validations find."""
    return bool(evidence.value("workload.schedule.monitor")) or "early_stopping" in str(evidence.value("callbacks"))
