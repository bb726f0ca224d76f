"""Holds what was seen: one reading of a GPU or of the host, and the mean and quantiles of many."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Phase = Literal["start", "train", "validate", "test", "checkpoint", "ceiling"]
TRAINING: tuple[Phase, ...] = ("train", "validate", "checkpoint")
"""Phases that figures of a run are over: from the first batch to the last, with what comes in between."""
KEPT = 10_000
"""Readings that quantiles are taken from; 83 minutes at the default rate are kept whole."""


class Reading(NamedTuple):
    """Figures of one GPU, or of the host, at the moment."""

    gpu: int
    """CUDA-visible number, or that of the host (`telemetry.machines`)."""
    values: Mapping[str, float]
    """Metric name -> value; absent or unread ones are left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading: a row of telemetry.csv."""

    time_s: float
    """Seconds since the run first started."""
    step: int
    """Optimizer steps done."""
    phase: Phase
    gpu: int
    """Its number in the run (`telemetry.machines`)."""
    values: Mapping[str, float]


class Series:
    """Mean, maximum and quantiles of one figure in bounded memory, however long the run.

    Exact up to `KEPT` readings; beyond, quantiles come from a uniform choice of that many (Vitter's algorithm R,
    https://doi.org/10.1145/3147.3165) while mean and maximum stay exact.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept, self._values = kept, list[float]()
        self._random = random.Random(0)
        self.num = 0
        self._sum, self._max = 0.0, 0.0

    def add(self, value: float) -> None:
        """One more reading."""
        self._max = value if self.num == 0 else max(self._max, value)
        self.num += 1
        self._sum += value
        if len(self._values) < self._kept:
            self._values.append(value)
        elif (place := self._random.randrange(self.num)) < self._kept:
            self._values[place] = value

    def entry(self) -> dict[str, float]:
        """``{mean, p5, p50, p95, max, n}``; only for a series that is not empty."""
        p5, p50, p95 = (float(value) for value in np.quantile(self._values, (0.05, 0.50, 0.95)))
        return {"mean": self._sum / self.num, "p5": p5, "p50": p50, "p95": p95, "max": self._max, "n": self.num}
