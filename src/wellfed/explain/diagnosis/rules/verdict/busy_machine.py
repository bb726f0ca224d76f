"""Finds that other programs used the cores that a run needed, so that its figures are distorted."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.observe.telemetry.machines import HOST
from wellfed.units import show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if in many readings the cores were full and others used a large part of them. None if the run
    needed none of them: no thread waited for a core, and no step for its batch."""
    cores, curve = evidence.cores, evidence.curves.get(HOST, {})
    own, others = curve.get("cpu_pct"), evidence.telemetry.others_cores
    waited_frac = evidence.record.host.get("core_wait_frac")
    if waited_frac is not None and waited_frac < limits.CORE_WAIT_FRAC and evidence.wait_frac < limits.WAIT_FRAC:
        return None
    if not cores or own is None or len(own) != len(others):
        return None
    known = np.isfinite(own) & np.isfinite(others)
    own, others = own[known] / 100, others[known]
    is_busy = (others >= limits.OTHERS_FRAC * cores) & (own + others >= limits.CPU_FULL_FRAC * cores)
    if np.sum(is_busy) < limits.FEWEST_OF_CARD or np.mean(is_busy) < limits.BUSY_READINGS_FRAC:
        return None
    frac, taken, left = float(np.mean(is_busy)), float(others[is_busy].mean()), float(own[is_busy].mean())
    when = "" if frac > limits.CPU_FULL_FRAC else f" for {show_percent(frac)} of the time"
    text = f"Don't judge this run: other programs took {taken:.1f} of your {cores:g} cores{when}"
    return Finding(
        "busy_machine",
        f"{text}; this run got {left:.1f}. Run it again when they have ended. No gain can be predicted from this run.",
        {"others_cores": taken, "own_cores": left, "cores": cores, "busy_frac": frac},
        lost_frac=frac * taken / cores,
    )
