"""What the GPUs did while the run trained, as ``gpus`` of run.json."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from wellfed.telemetry.series import TRAINING, Sample, Series

ENERGY = "energy_j"
"""A counter: its growth counts, not its values."""


class Summary:
    """Gathers samples; what falls into start, test and ceiling is left out. May be asked while it is added to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[int, dict[str, Series]] = {}
        self._energy_j: dict[int, float] = {}
        self._counter_j: dict[int, float] = {}

    def add(self, samples: Iterable[Sample]) -> None:
        """A round of samples."""
        with self._lock:
            for sample in samples:
                if not sample.is_host:
                    self._add(sample)

    def _add(self, sample: Sample) -> None:
        is_training = sample.phase in TRAINING
        if ENERGY in sample.values:
            self._add_energy(sample.gpu, sample.values[ENERGY], is_training)
        if is_training:
            series = self._series.setdefault(sample.gpu, {})
            for name, value in sample.values.items():
                if name != ENERGY:
                    series.setdefault(name, Series()).add(value)

    def _add_energy(self, gpu: int, counter_j: float, counts: bool) -> None:
        before_j, self._counter_j[gpu] = self._counter_j.get(gpu), counter_j
        if counts and before_j is not None:
            self._energy_j[gpu] = self._energy_j.get(gpu, 0.0) + max(0.0, counter_j - before_j)

    def entry(self, samples: int) -> dict[str, dict[str, Any]]:
        """``{"0": {util_pct: {mean, p5, p50, p95, max, n}, ..., energy_j, energy_per_sample_j}}``.

        Args:
            samples: training samples of the same time, over all ranks.
        """
        with self._lock:
            return {str(gpu): self._figures(gpu, samples) for gpu in sorted(self._series)}

    def _figures(self, gpu: int, samples: int) -> dict[str, Any]:
        figures: dict[str, Any] = {name: series.entry() for name, series in self._series[gpu].items()}
        if gpu in self._energy_j:
            figures[ENERGY] = self._energy_j[gpu]
            if samples > 0:
                figures["energy_per_sample_j"] = self._energy_j[gpu] / samples
        return figures
