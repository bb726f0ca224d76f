"""Finds steps that take longer and longer."""

from __future__ import annotations

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.rules.compute import clocks_limited
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.thresholds import OTHERS_FRAC, TREND_FACTOR
from wellfed.units import show_factor, show_ms, show_percent

_BLOCKS, _FEWEST = 10, 60
"""Number of parts of a run whose medians must rise, and minimum number of steps."""
_LARGEST_RISE = 0.4
"""Maximum share of the growth in one part. More is a jump, as when others begin to use the machine."""
_LARGEST_FALL = 0.3
"""Maximum fall from one part to the next over the mean rise, for noise of the medians."""
_IN_WORDS = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"}
_STARTED = 0.05
"""Share of the growth at which it is reported to have begun."""


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if the steps of each part of a run took longer than those of the part before."""
    samples, steps = evidence.steps.column("samples"), evidence.steps.column("step")
    times_ms = evidence.steps.rest_ms
    if len(times_ms) and len(samples) == len(times_ms) and np.all(samples > 0):
        times_ms = times_ms * float(np.mean(samples)) / samples  # the last batch of an epoch may be smaller
    levels = _rising(times_ms)
    if levels is None or clocks_limited.check(evidence) is not None or _others_rise(evidence):
        return None
    first, last = float(levels[0]), float(levels[-1])
    begun = int(np.argmax(levels > first + _STARTED * (last - first))) - 1
    index = round(begun * len(times_ms) / _BLOCKS)
    step = int(steps[index]) if len(steps) == len(times_ms) else index
    between_ms = np.array_split(np.nan_to_num(evidence.steps.column("host_ms")), _BLOCKS)
    grown_ms = np.median(between_ms[-1]) - np.median(between_ms[0]) if len(between_ms[-1]) else 0.0
    phase = _growing_phase(evidence, len(times_ms), 0.5 * (last - first))
    within = f"in {_IN_WORDS.get(phase, phase)}" if phase else "in forward, backward and optimizer"
    part = "between the steps" if grown_ms > 0.5 * (last - first) else within
    lost_frac = max(0.0, 1 - first / float(np.mean(times_ms)))
    text = (
        f"Steps take longer and longer: {show_ms(first)} at the start and {show_ms(last)} at the end, "
        f"{show_factor(last / first)} times as long, from step {step} on. The growth is {part}; waiting for data is "
        f"not in it. It cost {show_percent(lost_frac)} of the steps' time. Look for work that grows with each step: a "
        "list that the loss goes through, a graph that is never detached, a log that is read again."
    )
    figures: Figures = {"first_ms": first, "last_ms": last, "growth_factor": last / first, "from_step": step}
    if phase is not None:
        figures["grows_in"] = phase
    return Finding("step_time_trend", text, figures, lost_frac=lost_frac)


def _growing_phase(evidence: Evidence, num_steps: int, least_ms: float) -> str | None:
    """Returns the phase of compute that grew by more than this; None if none did, or if they are unknown."""
    for name, all_ms in evidence.steps.all_phases_ms.items():
        parts = np.array_split(all_ms[len(all_ms) - num_steps :], _BLOCKS)
        first_ms, last_ms = (part[np.isfinite(part)] for part in (parts[0], parts[-1]))
        if len(first_ms) and len(last_ms) and np.median(last_ms) - np.median(first_ms) > least_ms:
            return name
    return None


def _rising(times_ms: Series) -> Series | None:
    """Returns the median of each part if they rise throughout, by enough, and not in one jump; else None."""
    if len(times_ms) < _FEWEST:
        return None
    levels = np.array([np.median(part) for part in np.array_split(times_ms, _BLOCKS)])
    growth, rises = levels[-1] - levels[0], np.diff(levels)
    if levels[0] <= 0 or levels[-1] < TREND_FACTOR * levels[0]:
        return None
    is_even = rises.max() <= _LARGEST_RISE * growth and rises.min() >= -_LARGEST_FALL * growth / len(rises)
    return levels if is_even else None


def _others_rise(evidence: Evidence) -> bool:
    """Returns whether other programs took more and more of the machine."""
    others = evidence.telemetry.others_cores[np.isfinite(evidence.telemetry.others_cores)]
    if len(others) < 3:
        return False
    first, *_, last = (float(part.mean()) for part in np.array_split(others, 3))
    return last - first >= OTHERS_FRAC * (evidence.cores or 1.0)
