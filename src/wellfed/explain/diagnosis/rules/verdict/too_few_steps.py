"""Reports that a run measured too few steps for a diagnosis."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.thresholds import FEWEST_STEPS
from wellfed.units import counted


def check(evidence: Evidence) -> Finding | None:
    """Returns a note if too few steps ran to judge the speed."""
    measured = evidence.steps.num_measured
    if measured >= FEWEST_STEPS and evidence.record.time is not None:
        return None
    text = f"{counted(measured, 'step')} after the warm-up" if measured else "No step was measured after the warm-up"
    more = "give the run more steps (trainer.max_steps, trainer.max_epochs)"
    if evidence.record.status == "running":
        more = "ask again when the run has come further"
    return Finding(
        "too_few_steps",
        f"{text}: {'that is ' if measured else ''}too little to say where time is lost. It takes {FEWEST_STEPS}: "
        f"{more}.",
        {"steps_measured": measured},
        is_note=True,
    )
