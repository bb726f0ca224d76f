"""Defines readings of GPUs and host, and the statistics over many readings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Phase = Literal["start", "train", "validate", "test", "checkpoint", "ceiling"]
TRAINING: tuple[Phase, ...] = ("train", "validate", "checkpoint")
"""Phases that a run's figures cover: from the first batch to the last, with all in between."""
HOST = -1
"""Number of the host among the GPUs."""
ENERGY = "energy_j"
"""A counter; its growth is reported."""


class Reading(NamedTuple):
    """Current figures of one GPU, or of the host."""

    gpu: int
    """Number of the GPU by CUDA, or `HOST`."""
    values: Mapping[str, float]
    """Metric name -> value; absent ones are left out."""


class Source(Protocol):
    """A source of readings, always read from one thread."""

    name: str

    def read(self, *, slow: bool, edge: bool = False) -> Iterable[Reading]:
        """Reads what is due. May block. Must not raise for a figure that is not offered. Expensive figures are read
        only if ``slow``. At an ``edge`` (training begins or ends) only counters are read."""

    def close(self) -> None:
        """Ends the readings."""
        return  # not abstract: most sources hold nothing


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading: a row of telemetry.csv."""

    time_s: float
    """Seconds since the run first started."""
    step: int
    """Optimizer steps done."""
    phase: Phase
    gpu: int
    """Number of the GPU by CUDA, or `HOST`."""
    values: Mapping[str, float]


def levels(values: Any) -> dict[str, float]:
    """Returns ``{mean, p5, p50, p95, max, n}`` of an array of finite numbers, which must not be empty."""
    import numpy as np  # modules that start without it import this one

    p5, p50, p95 = (float(level) for level in np.quantile(values, (0.05, 0.50, 0.95)))
    mean, most = float(np.mean(values)), float(np.max(values))
    return {"mean": mean, "p5": p5, "p50": p50, "p95": p95, "max": most, "n": len(values)}
