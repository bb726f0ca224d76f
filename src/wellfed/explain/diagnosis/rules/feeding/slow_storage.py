"""Finds steps that wait because batches wait for a disk or a network while they are built."""

from __future__ import annotations

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.gains.feeding import knobs
from wellfed.explain.diagnosis.thresholds import LEAST_GAIN
from wellfed.explain.diagnosis.waiting import (
    CauseOfWaiting,
    cold_over_warm,
    has_slow_builds,
    slow_steps,
    stall_period_s,
    waiting_for,
)
from wellfed.units import show_duration, show_ms, show_percent


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if building hardly uses the CPU, and there is evidence that it waits for the disk."""
    waiting = waiting_for(evidence, "slow_storage")
    if waiting is None:
        return None
    feeding, figures = waiting.feeding, waiting.feeding.figures()
    if (period_s := stall_period_s(evidence, feeding)) is not None and has_slow_builds(evidence, feeding):
        return _stalls(evidence, waiting, period_s)
    text = (
        f"{waiting.share_text}: a batch takes {show_ms(feeding.build_ms)} to "
        f"build, only {show_percent(feeding.cpu_frac)} of it CPU time"
    )
    iowait_pct, cold = evidence.telemetry.mean("iowait_pct"), cold_over_warm(evidence)
    if iowait_pct is not None:
        text += f"; cores stood idle for a disk in {iowait_pct:.0f} % of the time"
        figures["iowait_pct"] = iowait_pct
    if cold is not None:
        text += f"; in the first epoch it took {cold:.2g} times as long as later"
        figures["cold_over_warm"] = cold
    text += ". Keep the data on a local disk, in few large files, or in memory."
    needed = feeding.workers_advised
    gain = feeding.gain(needed)
    if needed <= feeding.num_workers or gain.factor < LEAST_GAIN:
        return Finding("slow_storage", text, figures, lost_frac=waiting.frac)
    text += " More workers read in parallel, which helps unless the disk is at its limit."
    change = knobs(evidence, num_workers=needed)
    return Finding("slow_storage", text, figures, change, gain=Gain(gain.factor, 1.0, gain.high))


def _stalls(evidence: Evidence, waiting: CauseOfWaiting, period_s: float) -> Finding:
    slow_ms = evidence.steps.wait_ms[slow_steps(evidence, waiting.feeding)]
    text = (
        f"{show_percent(waiting.frac)} of training waits for data, nearly all of it in one step every "
        f"{show_duration(period_s)}, for {show_duration(float(slow_ms.mean()) / 1e3)}: the storage "
        "stalls that often, whichever samples are requested. Check what else uses it, or keep the data locally."
    )
    figures = {"stall_period_s": period_s, "stall_ms": float(slow_ms.mean()), "stalls": len(slow_ms)}
    return Finding("slow_storage", text, figures, lost_frac=waiting.frac)
