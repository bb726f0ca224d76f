"""Finds that a GPU alternates between busy and idle, where neither data nor callbacks delay it."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.thresholds import BUSY_PCT, FEWEST_READINGS, IDLE_PCT
from wellfed.observe.telemetry.machines import named
from wellfed.units import show_percent

_EXPLAINED_FRAC = 0.5
"""Share of idle time in waiting, copies and the loop, beyond which their rules explain it."""


def check(evidence: Evidence) -> Finding | None:
    """Returns levels and period of the swing, and settings with the same period."""
    gpu = _deepest(evidence)
    if gpu is None:
        return None
    curve = evidence.telemetry.curve("util_pct", gpu)
    low, high = (float(level) for level in np.percentile(curve, (5, 95)))
    idle_frac = 1 - float(curve.mean()) / high
    host_frac = evidence.record.time["host_frac"] if evidence.record.time else 0.0
    held_up_frac = evidence.wait_frac + evidence.copy_frac + host_frac
    if held_up_frac >= _EXPLAINED_FRAC * idle_frac:
        return None
    figures: Figures = {"gpu": named(gpu), "low_pct": low, "high_pct": high}
    deepest, text = evidence.swings.deepest, evidence.swings.describe_utilisation()
    if deepest is None or text is None:
        levels = f"between {low:.0f} % and {high:.0f} %"
        text = f"The utilisation of GPU {named(gpu)} goes up and down {levels}, without a period."
    else:
        figures["period_s"] = deepest[1].period_s
        due = evidence.swings.settings_with_period(deepest[1].period_s)
        text += f" As often comes {' and '.join(due)}." if due else " Nothing that was set comes as often."
    if evidence.record.time is not None:
        text += f" Waiting for data, copies and callbacks took {show_percent(held_up_frac)} of the time: look at what "
        text += "the model does in some steps only, and at what else uses this GPU."
    return Finding("utilisation_swings", text, figures, lost_frac=idle_frac - held_up_frac)


def _deepest(evidence: Evidence) -> int | None:
    """Returns the GPU that swings most, with a period if there is one; None without a swing."""
    if evidence.swings.deepest is not None:
        return evidence.swings.deepest[0]
    for gpu in evidence.telemetry.gpus:
        curve = evidence.telemetry.curve("util_pct", gpu)
        if len(curve) >= FEWEST_READINGS:
            low, high = np.percentile(curve, (5, 95))
            if high >= BUSY_PCT and low < IDLE_PCT:
                return gpu
    return None
