"""Finds periodic swings of a curve, and those of a run with the settings that have the same period.

A curve that jumps between two levels is a swing if its cycles are about equally long. Other curves must correlate with
themselves one period later, and two periods later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wellfed.explain.diagnosis.run_tables import Series, TrainingTelemetry
from wellfed.explain.diagnosis.step_times import StepTimes
from wellfed.record.entries import RunRecord, SwingEntry
from wellfed.units import counted, show_duration

MIN_PERIODS, MIN_SAMPLES = 5, 40
"""Minimum periods and samples. Fewer can't be distinguished from chance."""
_MOST_SAMPLES = 2048
"""Number of latest samples used of a longer series. A swing continues to the end."""
_LEAST_LIKENESS, _NEARLY = 0.5, 0.8
"""Minimum correlation of a curve with itself one period and two periods later, and share of the highest that a shorter
period must reach."""
_MOST_BETWEEN = 0.15
"""Maximum share of readings in the middle third of a two-level curve. Noise has a fifth or more there."""
_MOST_UNEVEN = 0.4
"""Maximum standard deviation of the cycles over their mean. It is 0.23 with 40 % of jitter."""
LEAST_DEPTH = 20
"""Minimum percentage points of utilisation from the 5th percentile to the 95th."""


@dataclass(frozen=True)
class Swing:
    """A curve that rises and falls with a period."""

    period_s: float
    low: float
    """5th percentile of the curve."""
    high: float
    """95th percentile."""

    @property
    def depth(self) -> float:
        """Difference of both levels."""
        return self.high - self.low


def swing_in_time(time_s: Series, values: Series) -> Swing | None:
    """Returns the swing of a curve read at ``time_s``; None if there is none, or too few readings. Readings may be
    missing or late. The period is at least three readings and at most a fifth of the time."""
    there = np.isfinite(values) & np.isfinite(time_s)
    time_s, values = time_s[there][-_MOST_SAMPLES:], values[there][-_MOST_SAMPLES:]
    if len(values) < MIN_SAMPLES:
        return None
    low, high = (float(level) for level in np.percentile(values, (5, 95)))
    period_s = _by_cycles(time_s, values, low, high) or _by_likeness(time_s, values)
    return None if period_s is None else Swing(period_s, low, high)


def _by_cycles(time_s: Series, values: Series, low: float, high: float) -> float | None:
    """Returns the mean cycle of a two-level curve, from rise to rise; None for other curves, or uneven cycles."""
    state = _state(values, low, high)
    known = np.flatnonzero(state)
    if low == high or 1 - len(known) / len(state) > _MOST_BETWEEN:
        return None
    rises = known[1:][(state[known[1:]] == 1) & (state[known[:-1]] == -1)]
    cycles_s = np.diff(time_s[rises])
    if len(cycles_s):
        gaps = np.cumsum(np.diff(time_s, prepend=time_s[0]) > np.median(cycles_s) / 2)
        cycles_s = cycles_s[np.diff(gaps[rises]) == 0]  # without cycles that contain a gap
    if len(cycles_s) < MIN_PERIODS or np.std(cycles_s) > _MOST_UNEVEN * np.mean(cycles_s):
        return None
    return float(np.mean(cycles_s))


def _state(values: Series, low: float, high: float) -> Series:
    """Returns 1 for values in the upper third between both levels, -1 in the lower third, and 0 in the middle."""
    third = (high - low) / 3
    return np.where(values >= high - third, 1, np.where(values <= low + third, -1, 0))


def _by_likeness(time_s: Series, values: Series) -> float | None:
    """Returns the shortest period after which the curve correlates with itself, and again after the next; else None."""
    interval_s = float(np.median(np.diff(time_s)))
    number = int((time_s[-1] - time_s[0]) / interval_s) + 1 if interval_s > 0 else 0
    if not MIN_SAMPLES <= number <= 4 * len(values):
        return None
    even = np.interp(time_s[0] + interval_s * np.arange(number), time_s, values)
    spectrum = np.fft.rfft(even - even.mean(), 2 * number)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, 2 * number)[:number]
    correlation = covariance / max(covariance[0], 1e-30) * (number / (number - np.arange(number)))
    longest = number // MIN_PERIODS
    below = np.flatnonzero(correlation[:longest] < 0)
    if not len(below):
        return None
    later = correlation[below[0] : longest + 1]
    lag = int(below[0] + np.argmax(later >= _NEARLY * later.max()))
    while lag < longest and correlation[lag + 1] > correlation[lag]:
        lag += 1
    return interval_s * lag if min(correlation[lag], correlation[2 * lag]) >= _LEAST_LIKENESS else None


_READINGS = 4
"""Minimum readings of the utilisation in a period that they can show."""
_LOCKSTEP = 0.5
"""Minimum correlation of the waiting with that of one round of the workers before."""
_LIKE = 0.1
"""Relative difference below which periods count as equal."""
_DUE = {
    "loader.num_workers": "a round of the loader's workers",
    "trainer.log_every_steps": "a row of metrics.csv",
    "trainer.checkpoint_every_steps": "a checkpoint",
    "trainer.validate_every_steps": "a validation",
    "epoch": "a new epoch",
}


@dataclass(frozen=True)
class RunSwings:
    """Swings of a run."""

    record: RunRecord
    steps: StepTimes
    telemetry: TrainingTelemetry

    @cached_property
    def lags(self) -> Mapping[str, int]:
        """Steps between periodic events, by setting."""
        trainer = self.record.config.get("trainer", {})
        names = ("log_every_steps", "checkpoint_every_steps", "validate_every_steps")
        lags = {f"trainer.{name}": int(trainer[name]) for name in names if trainer.get(name)}
        if (loader := self.record.plan.get("loader.num_workers")) and loader["value"]:
            lags["loader.num_workers"] = int(loader["value"])
        lengths = np.unique(self.steps.all.get("epoch", np.empty(0)), return_counts=True)[1]
        if len(lengths) > 2:  # the first and the last may be incomplete
            lags["epoch"] = int(np.median(lengths[1:-1]))
        return lags

    @cached_property
    def of_gpus(self) -> Mapping[int, Swing]:
        """Utilisation that rises and falls with a period, by GPU; empty for a run on the CPU.

        If steps wait for workers that finish together, and a round of these is shorter than a few readings, the
        readings seem to swing with a longer period. That is no GPU's.
        """
        found, workers = {}, self.lags.get("loader.num_workers", 0)
        round_s = self.steps.period_s(workers) if self._is_lockstep(workers) else None
        for gpu in self.telemetry.gpus:
            curve = self.telemetry.curves[gpu]
            at_s, util_pct = (curve.get(name, np.empty(0)) for name in ("time_s", "util_pct"))
            swing = swing_in_time(at_s, util_pct) if len(at_s) == len(util_pct) else None
            shortest_s = _READINGS * float(np.median(np.diff(at_s))) if len(at_s) > 1 else 0.0
            if swing is not None and (round_s is None or round_s >= shortest_s):
                found[gpu] = swing
        return found

    def _is_lockstep(self, workers: int) -> bool:
        """Returns whether the waiting of a step is like that of the step one round of the workers before."""
        wait_ms = self.steps.wait_ms
        if workers < 2 or len(wait_ms) < MIN_SAMPLES + workers or np.ptp(wait_ms[:-workers]) == 0:
            return False
        return bool(np.corrcoef(wait_ms[:-workers], wait_ms[workers:])[0, 1] > _LOCKSTEP)

    @property
    def deepest(self) -> tuple[int, Swing] | None:
        """The GPU whose utilisation swings most, and its swing; None without a visible swing."""
        found = max(self.of_gpus.items(), key=lambda one: one[1].depth, default=None)
        return None if found is None or found[1].depth < LEAST_DEPTH else found

    def entry(self) -> SwingEntry | None:
        """Returns the deepest swing of a GPU for run.json, with the settings of its period; None without one."""
        if self.deepest is None:
            return None
        period_s = self.deepest[1].period_s
        return {"period_s": period_s, "cause": " and ".join(self.settings_with_period(period_s)) or None}

    def describe_utilisation(self) -> str | None:
        """Returns levels and period of the GPU whose utilisation swings most, as text; None without a swing."""
        if self.deepest is None:
            return None
        gpu, swing = self.deepest
        alike = sum(abs(one.period_s / swing.period_s - 1) <= _LIKE for one in self.of_gpus.values()) - 1
        levels = f"between {swing.low:.0f} % and {swing.high:.0f} %"
        others = f", as {'does' if alike == 1 else 'do'} {counted(alike, 'other GPU')}" if alike else ""
        period = show_duration(swing.period_s)
        return f"The utilisation of GPU {gpu} swings {levels}, with a period of {period}{others}."

    def settings_with_period(self, period_s: float) -> list[str]:
        """Returns the settings of the run that imply such a period."""
        periods_s = {name: every_s for name, lag in self.lags.items() if (every_s := self.steps.period_s(lag))}
        minutes = self.record.config.get("trainer", {}).get("checkpoint_minutes")
        if minutes:
            periods_s["trainer.checkpoint_minutes"] = 60.0 * minutes
        return [
            f"{_DUE.get(name, 'a checkpoint')} ({name}, {show_duration(every_s)})"
            for name, every_s in periods_s.items()
            if abs(every_s / period_s - 1) <= _LIKE
        ]
