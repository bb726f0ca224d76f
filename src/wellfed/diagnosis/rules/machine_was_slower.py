"""Finds that the machine was slower in one part of a run than in another, where figures contradict each other."""

from __future__ import annotations

from wellfed.diagnosis.ceiling_check import contradiction, explanation
from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.feeding import feeding_of, is_starved, workers_crowd
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.rules import frequent_logging, slow_callbacks
from wellfed.diagnosis.thresholds import CEILING_FACTOR
from wellfed.diagnosis.waiting import cause_of_waiting
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """That the ceiling promises, or denies, what the time that went into data does not bear out; or that batches came
    late because others had the cores."""
    found = contradiction(evidence.record)
    factor = evidence.ceiling_factor
    if found is None and (busy := _others_took_it(evidence)) is not None:
        return busy
    if found is None or factor is None or workers_crowd(evidence):  # then it is known what made it slower
        return None
    if found.slower == "loop" and (frequent_logging.check(evidence) or slow_callbacks.check(evidence)):
        return None
    unit = evidence.record.throughput["sample_unit"] if evidence.record.throughput else "samples"
    to_know = "" if found.slower == "rank" else " Run it again on a machine that does nothing else to know."
    return Finding(
        "machine_was_slower",
        f"The run reached {show_percent(1 / factor)} of its ceiling. {explanation(found, unit)}{to_know}",
        {"slower": found.slower, "data_frac": found.data_frac, "ceiling_factor": factor},
        is_note=True,
    )


def _others_took_it(evidence: Evidence) -> Finding | None:
    """Cores were full, others kept many of them at work, and nothing else explains the waiting or the ceiling."""
    feeding, factor = feeding_of(evidence), evidence.ceiling_factor
    if feeding is None or not (feeding.has_company and feeding.is_cpu_full):
        return None
    if is_starved(evidence):
        lost = f"{show_percent(evidence.wait_frac)} of each step waits for data"
        has_cause = cause_of_waiting(evidence) is not None
    else:
        lost = f"The run reached {show_percent(1 / (factor or 1.0))} of its ceiling"
        has_cause = factor is None or factor <= CEILING_FACTOR
    if has_cause:
        return None
    said = (
        f"{lost}, and other processes kept {feeding.others:.1f} of {feeding.cores:g} cores at work meanwhile. Run it "
        "again on a machine that does nothing else to know."
    )
    return Finding("machine_was_slower", said, feeding.figures(), is_note=True)
