"""Holds a configuration that a tune tries, and the trial that measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wellfed.record.entries import RunRecord
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.rows import Row

_UNKNOWN_FRAC = 0.03
"""Half width of a figure without an interval, relative to the figure."""


@dataclass(frozen=True)
class Change:
    """A configuration to try."""

    overrides: tuple[str, ...]
    """Overrides behind the start's own; none for the start itself."""
    because: str
    """Reason for it, in one line."""
    turned: tuple[str, ...] = ()
    """Overrides that differ from the best configuration so far."""
    kind: str = "finding"
    """``finding``, or the kind of the move that led to it."""
    finding: str | None = None
    """Id of the finding that led to it; None where no finding did."""


@dataclass(frozen=True)
class TuneTrial:
    """A trial: its row, and the record of its run, which is empty where the trial left none."""

    row: Row
    record: RunRecord
    beside_seconds: float = 0.0
    """Duration of composing, preparing and planning before it."""

    @property
    def figure(self) -> float | None:
        """Samples per second; None where the trial did not end well, or measured no rate."""
        return SAMPLES_PER_S(self.row) if self.row.status == "ok" else None

    @property
    def problem(self) -> str:
        """Why there is no figure, in one line."""
        message = str((self.row.error or {}).get("message") or "") or ("" if self.row.status != "ok" else "no rate")
        return " ".join(f"{self.row.status}: {message}".split()).removesuffix(":")

    @property
    def relative_half(self) -> float:
        """Half of the 95 % interval from the steps of this one trial, relative to the figure."""
        if self.row.ci95 is None or not self.figure:
            return _UNKNOWN_FRAC
        return (self.row.ci95[1] - self.row.ci95[0]) / 2 / self.figure

    @property
    def ceiling_factor(self) -> float | None:
        """Ceiling over rate."""
        ceiling, rate = self.row.ceiling_samples_per_s, self.row.samples_per_s
        return ceiling / rate if ceiling and rate else None

    def value(self, knob: str) -> Any:
        """Returns a planned value; None where the plan has none."""
        entry = self.record.plan.get(knob)
        return None if entry is None else entry["value"]

    def asked(self, knob: str) -> Any:
        """Returns the configured value; None = left to the plan, or unknown."""
        found: Any = self.record.config
        for name in knob.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def is_from(self, knob: str, source: str) -> bool:
        """Returns whether the planned value has this source, such as ``set`` or ``measured``."""
        entry = self.record.plan.get(knob)
        return entry is not None and entry["source"] == source


def knob_of(setting: str) -> str:
    """Returns the knob or group that an override sets."""
    return setting.partition("=")[0].lstrip("+")


def with_overrides(settings: Sequence[str], turned: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides with further ones behind them; a repeated knob keeps the later value only."""
    knobs = {knob_of(setting) for setting in turned}
    return (*(setting for setting in settings if knob_of(setting) not in knobs), *turned)
