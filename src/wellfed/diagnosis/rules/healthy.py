"""Says of a run in which no other rule found lost time that there is nothing left to tune."""

from __future__ import annotations

from wellfed.diagnosis.evidence import Evidence
from wellfed.diagnosis.finding import Finding
from wellfed.diagnosis.thresholds import CEILING_FACTOR, WIDEST_HALF_FRAC
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding:
    """How near it came to what it could do, if that can be told. Asked where all others were silent."""
    factor, figures = evidence.ceiling_factor, {"wait_frac": evidence.wait_frac}
    throughput = evidence.record.throughput
    low, high = throughput["ci95"] if throughput and throughput["ci95"] else (0.0, 0.0)
    rate = throughput["samples_per_s"] if throughput else 0.0
    if throughput and (high - low) / 2 > WIDEST_HALF_FRAC * rate:
        figures |= {"ci95_low": low, "ci95_high": high}
        said = (
            f"Steps varied so much that nothing to tune can be told: {rate:,.0f} {throughput['sample_unit']}/s, with a "
            f"95 % interval from {max(0.0, low):,.0f} to {high:,.0f}. More steps (trainer.max_steps), and nothing else "
            "at work on the machine, make it narrower"
        )
    elif factor is None:
        said = f"Nothing to tune was found: {show_percent(evidence.wait_frac)} of a step waits for data"
        said += "; no ceiling was measured"
    elif factor <= 1:
        figures["of_ceiling_frac"] = 1 / factor
        said = "Stop tuning: this run is as fast as with all its data on the device"
    elif factor > CEILING_FACTOR and high:
        figures["of_ceiling_frac"] = 1 / factor
        said = (
            f"Nothing to tune was found: {show_percent(1 / factor)} of the ceiling, but the rate is known no better "
            f"than {show_percent(low / rate / factor)} to {show_percent(high / rate / factor)} of it"
        )
    else:
        figures["of_ceiling_frac"] = 1 / factor
        said = f"Stop tuning: {show_percent(1 / factor)} of the ceiling, and nothing that costs time was found"
    return Finding("healthy", f"{said}.", figures, is_note=True)
