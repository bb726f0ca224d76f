"""Notes batches of float64, where models use float32."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.thresholds import WIDE_FRAC, WIDE_MIB
from wellfed.units import MIB, show_bytes


def check(evidence: Evidence) -> Finding | None:
    """Returns a note if most of a batch is float64."""
    sizes = evidence.record.loading.get("batch_dtypes") or {}
    wide, total = sizes.get("float64", 0.0), sum(sizes.values())
    if wide < WIDE_MIB or wide < WIDE_FRAC * total:
        return None
    text = (
        f"{show_bytes(wide * MIB)} of a batch's {show_bytes(total * MIB)} are float64, as NumPy makes it. With "
        "float32 there is half as much to build, to hand over and to copy, and with uint8 (made a float in on_device) "
        "an eighth."
    )
    return Finding("wide_batches", text, {"float64_mib": wide, "batch_mib": total}, is_note=True)
