"""Finds that validations take a good part of the run."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.pauses import pauses, rarer
from wellfed.explain.diagnosis.thresholds import VALIDATION_FRAC
from wellfed.units import counted, show_duration, show_percent

_KNOB = "trainer.validate_every_steps"
_WANTED_FRAC = 0.03
"""Acceptable share of the wall time."""


def check(evidence: Evidence, least_frac: float = VALIDATION_FRAC) -> Finding | None:
    """Where they cost more than ``least_frac`` of the time, however few there were."""
    spent = pauses(evidence, "validate")
    if spent is None or spent.frac < least_frac:
        return None
    each_s = spent.total_s / spent.times
    said = f"{show_percent(spent.frac)} of the wall time of training went into "
    said += f"{counted(spent.times, 'validation')} of {show_duration(each_s)}"
    figures: dict[str, float | int | str] = {"validation_frac": spent.frac, "validations": spent.times}
    figures["validation_s"] = each_s
    every = evidence.value(_KNOB) or evidence.lags.get("epoch")
    wanted = min(rarer(every, spent.frac / _WANTED_FRAC), evidence.record.steps) if every else 0
    if spent.times == 1 or not every or wanted <= every:
        said = f"{said}. A smaller validation split takes less; so does a longer run."
        return Finding("frequent_validation", said, figures, lost_frac=spent.frac)
    when = f"one every {every} steps" if evidence.value(_KNOB) else "one at the end of each epoch"
    return Finding(
        "frequent_validation",
        f"{said}, {when}.",
        {**figures, "every_steps": int(every)},
        (f"{_KNOB}={wanted}",),
        changes_learning=_is_learned_from(evidence),
        gain=spent.gain(max(1.0, spent.times * every / wanted)),
    )


def _is_learned_from(evidence: Evidence) -> bool:
    """A schedule or a callback goes by what validations find."""
    return bool(evidence.value("workload.schedule.monitor")) or "early_stopping" in str(evidence.value("callbacks"))
