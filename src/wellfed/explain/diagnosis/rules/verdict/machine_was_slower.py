"""Reports figures of a run that contradict each other, if no measurement explains it."""

from __future__ import annotations

from wellfed.explain.diagnosis.ceiling_check import contradiction, explanation
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.gains.feeding import workers_take_cores
from wellfed.explain.diagnosis.rules.between_steps import frequent_logging, slow_callbacks
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a note if the ceiling contradicts the time spent on data and callbacks."""
    found, factor = contradiction(evidence.record), evidence.ceiling_factor
    if found is None or factor is None or workers_take_cores(evidence):  # crowding workers explain the slowness
        return None
    between = (frequent_logging.check, slow_callbacks.check, slow_callbacks.check_between_steps)
    if found.slower == "loop" and any(check(evidence) for check in between):
        return None
    unit = evidence.record.throughput["sample_unit"] if evidence.record.throughput else "samples"
    text = f"The run reached {show_percent(1 / factor)} of its ceiling. {explanation(found, unit)}"
    figures: Figures = {"slower": found.slower, "data_frac": found.data_frac, "ceiling_factor": factor}
    if found.slower != "rank":
        others = evidence.telemetry.mean_others_cores
        if others is not None and evidence.cores:
            figures["others_cores"] = others
            text += f" Other programs took {others:.1f} of your {evidence.cores:g} cores."
        text += " Run it again to know."
    return Finding("machine_was_slower", text, figures, is_note=True)
