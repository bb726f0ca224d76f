"""Describes a swing as text: its period, its depth, and the settings with the same period."""

from __future__ import annotations

from wellfed.explain.diagnosis.curves.swing import LEAST_DEPTH, Part
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.observe.telemetry.machines import named
from wellfed.units import show_duration

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


def swing_of(evidence: Evidence, setting: str) -> str | None:
    """Returns a sentence if steps take longer at the period that a setting implies, else None."""
    for swing in evidence.swings_of_steps:
        period_s = evidence.period_s(swing.lag)
        if setting in swing.settings and period_s is not None:
            because = _BECAUSE.get(setting, f"as often as {_DUE.get(setting, setting)} is due")
            return f"Every {swing.lag} steps ({show_duration(period_s)}) {_LONGER[swing.where]}, {because}."
    return None


def utilisation_swing(evidence: Evidence) -> str | None:
    """Returns levels and period of the GPU whose utilisation swings most, as text; None without a swing."""
    deepest = max(evidence.swings_of_gpus.items(), key=lambda found: found[1].depth, default=None)
    if deepest is None or deepest[1].depth < LEAST_DEPTH:
        return None
    gpu, swing = deepest
    levels = f"between {swing.low:.0f} % and {swing.high:.0f} %"
    return f"The utilisation of GPU {named(gpu)} swings {levels}, with a period of {show_duration(swing.period_s)}."


def settings_with_period(evidence: Evidence, period_s: float) -> list[str]:
    """Returns the settings of a run that imply such a period."""
    periods_s = {name: every_s for name, lag in evidence.lags.items() if (every_s := evidence.period_s(lag))}
    minutes = evidence.value("trainer.checkpoint_minutes")
    if minutes:
        periods_s["trainer.checkpoint_minutes"] = 60.0 * minutes
    return [
        f"{_DUE.get(name, 'a checkpoint')} ({name}, {show_duration(every_s)})"
        for name, every_s in periods_s.items()
        if abs(every_s / period_s - 1) <= _LIKE
    ]
