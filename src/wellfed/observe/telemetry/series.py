"""Defines readings of GPUs and host, bounded statistics over many readings, and their summary for run.json."""

from __future__ import annotations

import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from wellfed.observe.telemetry.machines import HOST, is_host, named

Phase = Literal["start", "train", "validate", "test", "checkpoint", "ceiling"]
TRAINING: tuple[Phase, ...] = ("train", "validate", "checkpoint")
"""Phases that a run's figures cover: from the first batch to the last, with all in between."""
KEPT = 10_000
"""Number of readings that quantiles are taken from. 83 minutes at the default rate are kept complete."""

ENERGY = "energy_j"
"""A counter; its growth is reported."""
COVERED_FRAC = 0.95
"""Minimum share of training that the counter must cover for energy per sample to be reported."""


class Reading(NamedTuple):
    """Current figures of one GPU, or of the host."""

    gpu: int
    """Number of the GPU or host (`telemetry.machines`)."""
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
    """Number in the run (`telemetry.machines`)."""
    values: Mapping[str, float]


class Series:
    """Mean, maximum and quantiles of one figure in bounded memory. Mean and maximum are exact. Beyond `KEPT` readings,
    quantiles come from a uniform sample (Vitter's algorithm R, https://doi.org/10.1145/3147.3165)."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept, self._values = kept, list[float]()
        self._random = random.Random(0)
        self.num = 0
        self._sum, self._max = 0.0, -math.inf

    def add(self, value: float) -> None:
        """Adds a reading."""
        self.num += 1
        self._max = max(self._max, value)
        self._sum += value
        if len(self._values) < self._kept:
            self._values.append(value)
        elif (index := self._random.randrange(self.num)) < self._kept:
            self._values[index] = value

    def entry(self) -> dict[str, float]:
        """Returns ``{mean, p5, p50, p95, max, n}``; the series must not be empty."""
        p5, p50, p95 = (float(value) for value in np.quantile(self._values, (0.05, 0.50, 0.95)))
        return {"mean": self._sum / self.num, "p5": p5, "p50": p50, "p95": p95, "max": self._max, "n": self.num}


class Summary:
    """Figures of GPUs and hosts during training, without start, test and ceiling. Safe for several threads.

    Energy between two readings is divided by the training time between them. So a late or missing reading moves no
    energy from one phase to another.
    """

    def __init__(self, trained_s: Callable[[float, float], float]) -> None:
        """``trained_s``: returns the seconds of training between two times."""
        self._trained_s = trained_s
        self._lock = threading.Lock()
        self._series: defaultdict[int, defaultdict[str, Series]] = defaultdict(lambda: defaultdict(Series))
        self._energies: defaultdict[int, _Energy] = defaultdict(_Energy)

    def add(self, samples: Iterable[Sample]) -> None:
        """Adds a round of samples."""
        with self._lock:
            for sample in samples:
                if ENERGY in sample.values:
                    self._energies[sample.gpu].add(sample.time_s, sample.values[ENERGY], self._trained_s)
                if sample.phase in TRAINING:
                    series = self._series[sample.gpu]
                    for name, value in sample.values.items():
                        if name != ENERGY:
                            series[name].add(value)

    def entry(self, samples: int, trained_s: float) -> dict[str, dict[str, Any]]:
        """Returns ``{"0": {util_pct: {mean, p5, p50, p95, max, n}, ..., energy_j, energy_per_sample_j}}``.

        Args:
            samples: training samples so far, over all ranks.
            trained_s: seconds of training so far.
        """
        entry: dict[str, dict[str, Any]] = {}
        with self._lock:
            for gpu in sorted(number for number in self._series if not is_host(number)):
                figures = self._figures(gpu)
                entry[str(named(gpu))] = figures
                energy = self._energies.get(gpu)
                if energy is not None and energy.covered_s > 0:
                    figures[ENERGY] = energy.spent_j
                    if samples > 0 and energy.covered_s >= COVERED_FRAC * trained_s:
                        figures["energy_per_sample_j"] = energy.spent_j / energy.covered_s * trained_s / samples
        return entry

    def host(self) -> dict[str, Any]:
        """Returns the same figures for this machine's host."""
        with self._lock:
            return self._figures(HOST)

    def _figures(self, gpu: int) -> dict[str, Any]:
        return {name: one.entry() for name, one in self._series[gpu].items()}


class _Energy:
    """Growth of one GPU's energy counter during training."""

    def __init__(self) -> None:
        self.spent_j = self.covered_s = 0.0
        self._last: tuple[float, float] | None = None

    def add(self, time_s: float, counter_j: float, trained_s: Callable[[float, float], float]) -> None:
        last, self._last = self._last, (time_s, counter_j)
        if last is None or time_s <= last[0] or counter_j < last[1]:
            return
        overlap_s = trained_s(last[0], time_s)
        self.spent_j += (counter_j - last[1]) * overlap_s / (time_s - last[0])
        self.covered_s += overlap_s
