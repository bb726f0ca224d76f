"""Finds the swings of a run, of its steps and of its GPUs, and describes them with the settings that imply them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wellfed.explain.diagnosis.curves.swing import (
    LEAST_DEPTH,
    Part,
    StepSwing,
    Swing,
    lags_of,
    swing_in_time,
    swings_in_steps,
)
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.step_times import StepTimes
from wellfed.explain.diagnosis.training_telemetry import TrainingTelemetry
from wellfed.observe.telemetry.machines import named
from wellfed.record import RunRecord, SwingEntry
from wellfed.units import counted, show_duration

_READINGS = 4
"""Minimum readings of the utilisation in a period that they can show."""
_LIKE = 0.1
"""Relative difference below which periods count as equal."""
_LONGER: dict[Part, str] = {
    "wait": "a step waits longer for its batch",
    "step": "a step takes longer",
    "gap": "training stands still",
}
_BECAUSE = {"loader.num_workers": "since the workers finish their batches at about the same time"}
_DUE = {
    "loader.num_workers": "a round of the loader's workers",
    "trainer.log_every_steps": "a row of metrics.csv",
    "trainer.checkpoint_every_steps": "a checkpoint",
    "trainer.validate_every_steps": "a validation",
    "epoch": "a new epoch",
}
_NONE: Series = np.empty(0)


@dataclass(frozen=True)
class RunSwings:
    """Swings of a run."""

    record: RunRecord
    steps: StepTimes
    telemetry: TrainingTelemetry

    @cached_property
    def lags(self) -> Mapping[str, int]:
        """Steps between periodic events, by setting."""
        return lags_of(self.record, self.steps.column("epoch"))

    @cached_property
    def of_steps(self) -> list[StepSwing]:
        """Step times that repeat, at lags that settings imply; the strongest first."""
        return swings_in_steps(self.steps.wait_ms, self.steps.rest_ms, self.lags, self.steps.gap_ms)

    @cached_property
    def of_gpus(self) -> Mapping[int, Swing]:
        """Utilisation that rises and falls with a period, by GPU.

        Readings do not show the swing of steps that is shorter than a few of them. They seem to swing with a longer
        period then, which is no GPU's.
        """
        found = {}
        of_steps = [period_s for swing in self.of_steps if (period_s := self.steps.period_s(swing.lag)) is not None]
        for gpu in self.telemetry.gpus:
            curve = self.telemetry.curves[gpu]
            at_s, util_pct = curve.get("time_s", _NONE), curve.get("util_pct", _NONE)
            swing = swing_in_time(at_s, util_pct) if len(at_s) == len(util_pct) else None
            shortest_s = _READINGS * float(np.median(np.diff(at_s))) if len(at_s) > 1 else 0.0
            if swing is not None and all(period_s >= shortest_s for period_s in of_steps):
                found[gpu] = swing
        return found

    @property
    def deepest(self) -> tuple[int, Swing] | None:
        """The GPU whose utilisation swings most, and its swing; None without a visible swing."""
        found = max(self.of_gpus.items(), key=lambda one: one[1].depth, default=None)
        return None if found is None or found[1].depth < LEAST_DEPTH else found

    def entry(self) -> SwingEntry | None:
        """Returns the swing for run.json: the strongest of the steps with its settings, else the deepest of the
        GPUs."""
        if self.of_steps and (first_s := self.steps.period_s(self.of_steps[0].lag)) is not None:
            first = self.of_steps[0]
            return {"period_s": first_s, "period_steps": first.lag, "cause": " ".join(first.settings), "r2": first.r2}
        if self.deepest is None:
            return None
        return {"period_s": self.deepest[1].period_s, "period_steps": None, "cause": None, "r2": None}

    def describe_steps(self, setting: str) -> str | None:
        """Returns a sentence if steps take longer at the period that a setting implies, else None."""
        for swing in self.of_steps:
            period_s = self.steps.period_s(swing.lag)
            if setting in swing.settings and period_s is not None:
                because = _BECAUSE.get(setting, f"as often as {_DUE.get(setting, setting)} is due")
                return f"Every {swing.lag} steps ({show_duration(period_s)}) {_LONGER[swing.where]}, {because}."
        return None

    def describe_utilisation(self) -> str | None:
        """Returns levels and period of the GPU whose utilisation swings most, as text; None without a swing."""
        if self.deepest is None:
            return None
        gpu, swing = self.deepest
        alike = sum(abs(one.period_s / swing.period_s - 1) <= _LIKE for one in self.of_gpus.values()) - 1
        levels = f"between {swing.low:.0f} % and {swing.high:.0f} %"
        others = f", as {'does' if alike == 1 else 'do'} {counted(alike, 'other GPU')}" if alike else ""
        period = show_duration(swing.period_s)
        return f"The utilisation of GPU {named(gpu)} swings {levels}, with a period of {period}{others}."

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
