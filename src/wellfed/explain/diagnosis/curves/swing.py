"""Finds swings of a curve between two levels, and those of a run with the settings that have the same period.

A curve that jumps between two levels is a swing if its cycles, from rise to rise, are about equally long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wellfed.explain.diagnosis.run_tables import Series, TrainingTelemetry
from wellfed.explain.diagnosis.step_times import StepTimes
from wellfed.record.entries import RunRecord, SwingEntry
from wellfed.units import show_duration

MIN_PERIODS, MIN_SAMPLES = 5, 40
"""Minimum periods and samples. Fewer can't be distinguished from chance."""
_MOST_SAMPLES = 2048
"""Number of latest samples used of a longer series. A swing continues to the end."""
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
    """Returns the swing of a curve between two levels, read at ``time_s``; None if there is none, the cycles are
    uneven, or there are too few readings. Readings may be missing or late."""
    there = np.isfinite(values) & np.isfinite(time_s)
    time_s, values = time_s[there][-_MOST_SAMPLES:], values[there][-_MOST_SAMPLES:]
    if len(values) < MIN_SAMPLES:
        return None
    low, high = (float(level) for level in np.percentile(values, (5, 95)))
    third = (high - low) / 3
    state = np.where(values >= high - third, 1, np.where(values <= low + third, -1, 0))
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
    return Swing(float(np.mean(cycles_s)), low, high)


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
        levels = f"between {swing.low:.0f} % and {swing.high:.0f} %"
        period = show_duration(swing.period_s)
        return f"The utilisation of GPU {gpu} swings {levels}, with a period of {period}."

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
