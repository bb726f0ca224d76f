"""Sums up what the GPUs did while the run trained, as ``gpus`` of run.json."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from wellfed.observe.telemetry.machines import is_host, named
from wellfed.observe.telemetry.series import TRAINING, Sample, Series

ENERGY = "energy_j"
"""A counter: its growth counts, not its values."""
COVERED_FRAC = 0.95
"""Share of training that the counter must have been read over before anything is said of energy per sample."""


class Summary:
    """Gathers samples; what falls into start, test and ceiling is left out. May be asked while it is added to.

    A reading of the energy counter that comes late, or not at all, moves no energy from one phase to another: growth
    between two readings is shared out by the time of training in between.
    """

    def __init__(self, trained_s: Callable[[float, float], float]) -> None:
        """``trained_s``: seconds of training between two times."""
        self._trained_s = trained_s
        self._lock = threading.Lock()
        self._series: defaultdict[int, defaultdict[str, Series]] = defaultdict(lambda: defaultdict(Series))
        self._energies: defaultdict[int, _Energy] = defaultdict(_Energy)

    def add(self, samples: Iterable[Sample]) -> None:
        """A round of samples."""
        with self._lock:
            for sample in samples:
                if is_host(sample.gpu):
                    continue
                if ENERGY in sample.values:
                    self._energies[sample.gpu].add(sample.time_s, sample.values[ENERGY], self._trained_s)
                if sample.phase in TRAINING:
                    series = self._series[sample.gpu]
                    for name, value in sample.values.items():
                        if name != ENERGY:
                            series[name].add(value)

    def entry(self, samples: int, trained_s: float) -> dict[str, dict[str, Any]]:
        """``{"0": {util_pct: {mean, p5, p50, p95, max, n}, ..., energy_j, energy_per_sample_j}}``.

        Args:
            samples: training samples so far, over all ranks.
            trained_s: seconds of training so far.
        """
        entry: dict[str, dict[str, Any]] = {}
        with self._lock:
            for gpu, series in sorted(self._series.items()):
                figures: dict[str, Any] = {name: one.entry() for name, one in series.items()}
                entry[str(named(gpu))] = figures
                energy = self._energies.get(gpu)
                if energy is not None and energy.covered_s > 0:
                    figures[ENERGY] = energy.spent_j
                    if samples > 0 and energy.covered_s >= COVERED_FRAC * trained_s:
                        figures["energy_per_sample_j"] = energy.spent_j / energy.covered_s * trained_s / samples
        return entry


class _Energy:
    """Growth of one GPU's energy counter while the run trained."""

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
