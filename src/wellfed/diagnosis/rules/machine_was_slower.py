"""Finds that the machine was slower in one part of a run than in another, where figures contradict each other."""

from __future__ import annotations

from wellfed.diagnosis.ceiling_check import contradiction, explanation
from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.feeding import workers_crowd
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.rules import frequent_logging, slow_callbacks
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """That the ceiling promises, or denies, what the time that went into data does not bear out."""
    found = contradiction(evidence.record)
    factor = evidence.ceiling_factor
    if found is None or factor is None or workers_crowd(evidence):  # then it is known what made it slower
        return None
    if found.slower == "loop" and (frequent_logging.check(evidence) or slow_callbacks.check(evidence)):
        return None
    unit = evidence.record.throughput["sample_unit"] if evidence.record.throughput else "samples"
    return Finding(
        "machine_was_slower",
        f"The run reached {show_percent(1 / factor)} of its ceiling. {explanation(found, unit)} Run it again on a "
        "machine that does nothing else to know.",
        {"slower": found.slower, "data_frac": found.data_frac, "ceiling_factor": factor},
        is_note=True,
    )
