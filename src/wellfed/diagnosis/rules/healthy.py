"""Says of a run in which no other rule found lost time that there is nothing left to tune."""

from __future__ import annotations

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.thresholds import CEILING_FACTOR
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding:
    """How near it came to what it could do. Asked where all others were silent."""
    factor, figures = evidence.ceiling_factor, {"wait_frac": evidence.wait_frac}
    throughput = evidence.record.throughput
    if factor is None:
        said = f"Nothing to tune was found: {show_percent(evidence.wait_frac)} of a step waits for data"
        said += "; no ceiling was measured"
    elif factor <= 1:
        figures["of_ceiling_frac"] = 1 / factor
        said = "Stop tuning: this run is as fast as with all its data on the device"
    elif factor > CEILING_FACTOR and throughput and throughput["ci95"]:
        low, high = (rate / throughput["samples_per_s"] for rate in throughput["ci95"])
        figures["of_ceiling_frac"] = 1 / factor
        said = (
            f"Nothing to tune was found: {show_percent(1 / factor)} of the ceiling, but the rate is known no better "
            f"than {show_percent(low / factor)} to {show_percent(high / factor)} of it"
        )
    else:
        figures["of_ceiling_frac"] = 1 / factor
        said = f"Stop tuning: {show_percent(1 / factor)} of the ceiling, and nothing that costs time was found"
    return Finding("healthy", f"{said}.", figures, is_note=True)
