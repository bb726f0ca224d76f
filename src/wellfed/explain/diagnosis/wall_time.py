"""Computes where the wall time of training went: steps, pauses, start and end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from wellfed.explain.diagnosis.step_times import StepTimes
from wellfed.explain.diagnosis.thresholds import SLOW_START_S
from wellfed.observe.timing.wall import hooks_within_steps_s
from wellfed.record import RunRecord, WallEntry

_PAUSES = ("validate", "checkpoint")
"""Phases that interrupt training."""


@dataclass(frozen=True)
class WallTime:
    """Wall time of training."""

    record: RunRecord
    steps: StepTimes
    ceiling_factor: float | None
    """The ceiling over the rate; None if unknown."""

    @cached_property
    def entry(self) -> WallEntry | None:
        """Wall time of training by kind, from the record or else derived from the tables; None if both are empty."""
        if self.record.wall is not None or not len(self.steps.all.get("wait_ms", ())):
            return self.record.wall
        steps_s, between_s = float(self.steps.all_ms.sum()) / 1e3, float(self.steps.gap_ms.sum()) / 1e3
        phases = self.record.phases
        validation_s, checkpoint_s = (phases[one]["total_s"] if one in phases else 0.0 for one in _PAUSES)
        other_s = max(0.0, between_s - validation_s - checkpoint_s)
        return {
            "total_s": steps_s + validation_s + checkpoint_s + other_s,
            "start_s": 0.0,
            "steps_s": steps_s,
            "validation_s": validation_s,
            "checkpoint_s": checkpoint_s,
            "epoch_end_s": 0.0,
            "logging_s": 0.0,
            "callbacks": {},
            "end_s": 0.0,
            "other_s": other_s,
        }

    @cached_property
    def once_s(self) -> float:
        """Seconds that a run loses once, whatever its length: start, end, and the excess of the first steps."""
        wall, warmup = self.entry, self.steps.num_warmup
        if wall is None:
            return 0.0
        first_s = float(self.steps.all_ms[:warmup].sum()) / 1e3
        return wall["start_s"] + wall["end_s"] + max(0.0, first_s - warmup * (self.steps.mean_ms or 0.0) / 1e3)

    @cached_property
    def steps_frac(self) -> float | None:
        """Share of the wall time of training spent in steps; None if unknown. A loss at start and end below
        `SLOW_START_S` is left out, since no setting changes it."""
        wall = self.entry
        if wall is None:
            return None
        once_s = self.once_s
        late_s = max(0.0, once_s - wall["start_s"] - wall["end_s"])
        of_s = wall["total_s"] - (once_s if once_s < SLOW_START_S else 0.0)
        in_steps_s = wall["steps_s"] - late_s + hooks_within_steps_s(wall)
        return max(0.0, in_steps_s / of_s) if of_s > 0 else None

    @property
    def at_ceiling_frac(self) -> float | None:
        """Share of the wall time of training that the same steps would take at the ceiling's rate; None if unknown."""
        if self.steps_frac is None or self.ceiling_factor is None:
            return None
        return min(1.0, self.steps_frac / max(1.0, self.ceiling_factor))
