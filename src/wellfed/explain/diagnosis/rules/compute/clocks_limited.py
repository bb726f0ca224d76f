"""Finds clocks of a card that power or heat held down."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.thresholds import LIMITED_FRAC
from wellfed.observe.telemetry.machines import named
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a note on the card that was limited most. No knob changes it."""
    found = [
        (share, gpu, cause)
        for gpu in evidence.telemetry.gpus
        for cause, name in (("heat", "heat_limited"), ("power", "power_limited"))
        if (share := evidence.telemetry.mean(name, gpu) or 0.0) > LIMITED_FRAC
    ]
    if not found:
        return None
    share, gpu, cause = max(found)
    figures: Figures = {"limited_by": cause, "limited_frac": share, "gpu": named(gpu)}
    text = f"The clocks of GPU {named(gpu)} were held down by {cause} in {show_percent(share)} of the readings"
    clocks = evidence.telemetry.curve("sm_clock_mhz", gpu)
    if len(clocks):
        figures |= {"sm_clock_mhz": float(np.mean(clocks)), "sm_clock_max_mhz": float(clocks.max())}
        text += f", at {clocks.mean():.0f} MHz on average (at most {clocks.max():.0f} were seen)"
    outside = (
        "cooling, or what else heats that machine" if cause == "heat" else "its power limit (nvidia-smi -q -d POWER)"
    )
    return Finding(
        "clocks_limited", f"{text}. No setting of a run changes that: look at {outside}.", figures, is_note=True
    )
