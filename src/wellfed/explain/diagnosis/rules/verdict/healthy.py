"""Reports that nothing is left to tune, if training time was spent in steps at the ceiling's rate."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.thresholds import LEAST_AT_CEILING_FRAC
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns the note if at least `LEAST_AT_CEILING_FRAC` of the wall time was spent in such steps."""
    factor, frac = evidence.ceiling_factor, evidence.wall.at_ceiling_frac
    if factor is None or frac is None or frac < LEAST_AT_CEILING_FRAC:
        return None
    if factor <= 1:
        text = "Stop tuning: this run is as fast as with all its data on the device"
    else:
        text = f"Stop tuning: {show_percent(1 / factor)} of the ceiling, and nothing that costs time was found"
    figures = {"wait_frac": evidence.wait_frac, "of_ceiling_frac": 1 / factor, "at_ceiling_frac": frac}
    return Finding("healthy", f"{text}.", figures, is_note=True)
