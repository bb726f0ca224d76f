"""Says that time is lost for which no other rule has found a cause."""

from __future__ import annotations

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.feeding import is_starved, steady_wait_frac
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.thresholds import CEILING_FACTOR, WAIT_FRAC
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """How much is lost, and where to look. Asked where all others were silent."""
    factor, wait_frac = evidence.ceiling_factor, evidence.wait_frac
    elsewhere = "debug=profiler shows what a step spends its time on."
    if is_starved(evidence):
        said = f"{show_percent(wait_frac)} of each step waits for data, and what holds the batches up can't be told"
        return Finding("unexplained", f"{said}. {elsewhere}", {"wait_frac": wait_frac}, lost_frac=wait_frac)
    if factor is None or factor <= CEILING_FACTOR:
        return None
    if wait_frac > WAIT_FRAC and steady_wait_frac(evidence) <= WAIT_FRAC:
        said = f"{show_percent(wait_frac)} of training waits for data, nearly all of that in the first step of each"
        said += " epoch: nothing is built ahead across its end. Longer epochs lose less."
        return Finding("unexplained", said, {"wait_frac": wait_frac}, lost_frac=wait_frac)
    said = f"The run reached {show_percent(1 / factor)} of its ceiling, and no cause was recognised. {elsewhere}"
    return Finding("unexplained", said, {"ceiling_factor": factor}, lost_frac=1 - 1 / factor)
