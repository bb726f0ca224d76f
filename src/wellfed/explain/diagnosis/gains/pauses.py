"""Computes the cost of pauses of training (validations, checkpoints), and the gain of fewer pauses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Gain

_WHILE_TRAINING = ("train", "validate", "checkpoint")
"""Phases whose sum is the time of a training without a measured wall time."""
_IN_WALL = {"validate": "validation_s", "checkpoint": "checkpoint_s"}
MOST_RATIO = 1.5
"""Maximum ratio of the numbers of pauses and epochs if there is a pause at the end of each epoch."""


@dataclass(frozen=True)
class Pauses:
    """Time and number of the pauses of one phase."""

    total_s: float
    times: int
    frac: float
    """Share of the wall time of training."""
    long_frac: float
    """The same of a long run, without the time that a run loses once."""

    @property
    def each_s(self) -> float:
        """Mean seconds of a pause."""
        return self.total_s / self.times

    def gain(self, times: float) -> Gain:
        """Returns the gain of the whole run with ``times`` pauses; at most that of a long run with none."""
        won_frac = self.frac * max(0.0, 1 - times / self.times)
        return Gain.of_time(won_frac, 0.85 * won_frac, self.long_frac)


def pauses(evidence: Evidence, phase: str) -> Pauses | None:
    """Returns the pauses of a phase; None if there were none, or they were not timed."""
    phases, wall = evidence.record.phases, evidence.record.wall
    times = phases[phase]["times"] if phase in phases else 0
    if wall is not None and wall["total_s"] > 0:
        total_s: float = wall[_IN_WALL[phase]]  # type: ignore[literal-required]
        all_s, long_s = wall["total_s"], max(total_s, evidence.wall.repeated_s)
        times = max(1, times)
    else:
        total_s = phases[phase]["total_s"] if times else 0.0
        all_s = long_s = sum(phases[name]["total_s"] for name in _WHILE_TRAINING if name in phases)
    return Pauses(total_s, times, total_s / all_s, total_s / long_s) if total_s > 0 else None


def are_of_epochs(times: float, epochs: float) -> bool:
    """Returns whether there are about as many pauses as epochs."""
    return max(times, epochs) <= MOST_RATIO * min(times, epochs)


def distance(evidence: Evidence, knob: str, times: float) -> tuple[float, str]:
    """Returns the steps from one of ``times`` pauses to the next, and this as text; 0 and no text if unknown.

    Without the knob they are at the ends of epochs. A watched script, whose wall time was not measured, need not have
    them there.
    """
    if every := evidence.value(knob):
        return int(every), f"every {every} steps"
    length = evidence.swings.lags.get("epoch")
    if not length or (evidence.record.wall is None and not are_of_epochs(times, evidence.record.steps / length)):
        return 0, ""
    return length, "at the end of each epoch"


def rarer(every: float, by: float) -> int:
    """Returns a round number of steps, at least ``by`` times ``every``."""
    least = max(2.0, every * max(1.0, by))
    power = 10.0 ** np.floor(np.log10(least))
    return int(next(digit * power for digit in (1, 2, 5, 10) if digit * power >= 0.999 * least))
