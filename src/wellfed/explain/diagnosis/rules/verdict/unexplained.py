"""Reports lost time for which no other rule found a cause."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.gains.feeding import is_starved
from wellfed.explain.diagnosis.thresholds import CEILING_FACTOR, WAIT_FRAC
from wellfed.units import show_percent

_MOSTLY = 0.8


def check(evidence: Evidence) -> Finding | None:
    """Returns how much time is lost, and how to find the cause. For runs without other findings."""
    factor, wait_frac = evidence.ceiling_factor, evidence.wait_frac
    advice = "debug=profiler shows what a step spends its time on."
    is_below = factor is not None and factor > CEILING_FACTOR * _uncertainty(evidence)
    if wait_frac > WAIT_FRAC and (is_below or is_starved(evidence)) and _epoch_start_frac(evidence) >= _MOSTLY:
        text = f"{show_percent(wait_frac)} of training waits for data, nearly all of that in the first steps of each"
        text += " epoch: nothing is built ahead across its end. Longer epochs lose less."
        return Finding("unexplained", text, {"wait_frac": wait_frac}, lost_frac=wait_frac)
    if is_starved(evidence):
        text = f"{show_percent(wait_frac)} of each step waits for data, and the cause of the delay is unknown"
        return Finding("unexplained", f"{text}. {advice}", {"wait_frac": wait_frac}, lost_frac=wait_frac)
    if factor is None or not is_below:
        return None
    text = f"The run reached {show_percent(1 / factor)} of its ceiling, and no cause was recognised. {advice}"
    return Finding("unexplained", text, {"ceiling_factor": factor}, lost_frac=1 - 1 / factor)


def _uncertainty(evidence: Evidence) -> float:
    """Returns the upper end of the rate's interval over the rate, >= 1."""
    throughput = evidence.record.throughput
    if not throughput or not throughput["ci95"] or throughput["samples_per_s"] <= 0:
        return 1.0
    return throughput["ci95"][1] / throughput["samples_per_s"]


def _epoch_start_frac(evidence: Evidence) -> float:
    """Returns the share of all waiting in the first steps of later epochs, one for each worker."""
    starts = np.flatnonzero(np.diff(evidence.steps.column("epoch")) > 0) + 1
    if not evidence.num_workers or not len(starts):
        return 0.0
    indices = np.unique((starts[:, None] + np.arange(evidence.num_workers)).ravel())
    waited_ms = evidence.steps.wait_ms
    return float(waited_ms[indices[indices < len(waited_ms)]].sum() / max(waited_ms.sum(), 1e-9))
