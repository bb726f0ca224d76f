"""Says that time is lost for which no other rule has found a cause."""

from __future__ import annotations

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.feeding import is_starved
from wellfed.diagnosis.feeding import steady_wait_frac
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.thresholds import CEILING_FACTOR
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """How much is lost, and where to look. Asked where all others were silent."""
    factor, wait_frac = evidence.ceiling_factor, evidence.wait_frac
    lost_frac = wait_frac
    if is_starved(evidence):
        said = f"{show_percent(wait_frac)} of each step waits for data, and what holds the batches up can't be told"
        figures = {"wait_frac": wait_frac}
    elif factor is not None and factor > CEILING_FACTOR:
        said = f"The run reached {show_percent(1 / factor)} of its ceiling, and no cause was recognised"
        figures = {"ceiling_factor": factor}
        lost_frac = 1 - 1 / factor
    else:
        return None
    said += ". debug=profiler shows what a step spends its time on."
    return Finding("unexplained", said, figures, lost_frac=lost_frac)
