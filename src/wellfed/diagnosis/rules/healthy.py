"""Says of a run in which no other rule found lost time that there is nothing left to tune."""

from __future__ import annotations

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding:
    """How near it came to what it could do. Asked where all others were silent."""
    factor, figures = evidence.ceiling_factor, {"wait_frac": evidence.wait_frac}
    if factor is None:
        said = f"Nothing to tune was found: {show_percent(evidence.wait_frac)} of a step waits for data"
        said += "; no ceiling was measured"
    elif factor <= 1:
        figures["of_ceiling_frac"] = 1 / factor
        said = "Stop tuning: this run is as fast as with all its data on the device"
    else:
        figures["of_ceiling_frac"] = 1 / factor
        said = f"Stop tuning: {show_percent(1 / factor)} of the ceiling, and nothing that costs time was found"
    return Finding("healthy", f"{said}.", figures, is_note=True)
