"""Compares the ceiling of a run with the time that the run waited for data.

The ceiling is measured at another time than training. If the machine was slower at one of the two, their ratio is not
the gain of a better loader. The share of time spent waiting shows this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from wellfed.observe.timing.wall import hooks_within_steps_s
from wellfed.record.entries import RunRecord
from wellfed.units import show_percent

_NOISE_FRAC = 0.1
"""Minimum relative difference for a contradiction, since the ceiling covers only some 20 steps."""
_EXPLAINED_FRAC = 0.5
"""Minimum ratio of the time that the ceiling would save to the time spent on data, for both to agree."""
Slower = Literal["steps", "ceiling"]
_WHY: Mapping[Slower, str] = {
    "steps": "the steps, or what comes between them, were slower than in the ceiling",
    "ceiling": "so the ceiling is too low: something slowed it down",
}


@dataclass(frozen=True)
class Contradiction:
    """Contradiction of rate, ceiling and waiting, which is impossible at constant speed of the machine."""

    slower: Slower
    """Part that took longer than the other figures predict."""
    data_frac: float
    """Share of training's time spent on data: waiting for it and copying it."""

    @property
    def message(self) -> str:
        """Contradiction between the ceiling and the steps, in a sentence."""
        only = "" if self.slower == "ceiling" else "only "
        return f"But {only}{show_percent(self.data_frac)} of its time went into data: {_WHY[self.slower]}."


def contradiction(record: RunRecord) -> Contradiction | None:
    """Returns which figures of a record contradict each other; None if none do, or one was not measured."""
    throughput, ceiling, time = record.throughput, record.ceiling, record.time
    if not (throughput and ceiling and time):
        return None
    rate, top = throughput["samples_per_s"], ceiling["samples_per_s"]
    low, high = throughput["ci95"] or (rate, rate)
    data = min(time["wait_frac"] + (time["copy_frac"] or 0.0), 0.999)
    hooks_s = hooks_within_steps_s(record.wall) if record.wall else 0.0  # the ceiling runs none of them
    hooks_frac = hooks_s / (record.wall["steps_s"] + hooks_s) if record.wall and hooks_s else 0.0
    known = min(data + hooks_frac, 0.999)
    gap = 1 - rate / top  # share of training's time saved at the ceiling's rate
    noise = 1 + _NOISE_FRAC
    if known < _EXPLAINED_FRAC * gap and top > noise * high / (1 - known):
        return Contradiction("steps", data)
    if data > _NOISE_FRAC and gap < _EXPLAINED_FRAC * data and noise * top < low / (1 - data):
        return Contradiction("ceiling", data)
    return None


def of_ceiling(record: RunRecord) -> float | None:
    """Returns the rate over the ceiling; None if one of them was not measured."""
    throughput, ceiling = record.throughput, record.ceiling
    return throughput["samples_per_s"] / ceiling["samples_per_s"] if throughput and ceiling else None
