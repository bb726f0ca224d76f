"""Finds memory, of a card or of the host, that grows from the beginning of a run to its end."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.thresholds import CREEP_FRAC, CREEP_WINDOW
from wellfed.observe.telemetry.machines import HOST, label_of, named
from wellfed.units import show_duration, show_gib

_BLOCKS = 5
_LEAST_OF_MEAN = 0.25
"""Minimum growth of each block over the mean growth. Less means that the growth has ended."""


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the growth never ends, unlike a cache that fills."""
    machine = evidence.record.machine
    sizes = {label_of(gpu): gpu.get("memory_gib") for gpu in machine.get("gpus") or [] if "index" in gpu}
    for gpu in evidence.telemetry.gpus:
        found = _growth(evidence, "mem_used_gib", gpu, sizes.get(str(named(gpu))))
        if found is not None:
            why = (
                "Something keeps tensors of past steps (a list of losses that were not detached), or batches of "
                "ever new lengths leave gaps, which gpu.allocator=expandable avoids."
            )
            return _finding(f"Memory in use on GPU {named(gpu)}", found, why, ended=evidence.record.status == "oom")
    # Pages of a memory map count when first read, so in the first epoch they grow without a leak.
    if len(epochs := evidence.steps.column("epoch")) and np.nanmax(epochs) >= 1:
        found = _growth(evidence, "rss_gib", HOST, machine.get("ram_gib"))
        if found is not None:
            why = "Something keeps what past steps or samples made: a list, or a cache without a limit."
            return _finding("Host memory of this run", found, why, ended=False)
    return None


def _finding(what: str, growth: tuple[float, float, float], why: str, *, ended: bool) -> Finding:
    start_gib, end_gib, left_s = growth
    text = f"{what} grew from {show_gib(start_gib)} to {show_gib(end_gib)} and was still growing"
    text += ", until it was full" if ended else f": at this rate it is full after {show_duration(left_s)} more"
    return Finding(
        "memory_creeps",
        f"{text}. {why}",
        {"start_gib": start_gib, "end_gib": end_gib, "full_in_s": 0.0 if ended else left_s},
        lost_frac=1.0 if ended else 0.0,
    )


def _growth(evidence: Evidence, name: str, gpu: int, size_gib: float | None) -> tuple[float, float, float] | None:
    """Returns the first and last GiB, and the seconds until it is full; None if growth is too small or has ended."""
    curve = evidence.curves.get(gpu, {})
    used, time_s = curve.get(name, np.empty(0)), curve.get("time_s", np.empty(0))
    known = np.isfinite(used) & np.isfinite(time_s) if len(used) == len(time_s) else np.zeros(0, bool)
    if not size_gib or known.sum() < 2 * CREEP_WINDOW:
        return None
    used, time_s = used[known], time_s[known]
    smooth: Series = np.convolve(used, np.full(CREEP_WINDOW, 1 / CREEP_WINDOW), "valid")
    rose = float(smooth[-1] - smooth[0])
    if rose < CREEP_FRAC * size_gib:
        return None
    levels = np.array([np.median(block) for block in np.array_split(used[len(used) // 10 :], _BLOCKS)])
    steps = np.diff(levels)
    if steps.min() < _LEAST_OF_MEAN * max(steps.mean(), 1e-9):
        return None
    rate = rose / float(time_s[-1] - time_s[0])
    return float(smooth[0]), float(used[-1]), max(0.0, size_gib - float(used[-1])) / rate
