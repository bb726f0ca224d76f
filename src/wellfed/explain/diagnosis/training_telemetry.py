"""Computes figures of GPUs and host during training from the columns of telemetry.csv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wellfed.explain.diagnosis.run_tables import Series
from wellfed.observe.telemetry.machines import HOST, is_host

_EMPTY = np.empty(0)


@dataclass(frozen=True)
class TrainingTelemetry:
    """Readings of GPUs and host during training."""

    curves: Mapping[int, Mapping[str, Series]]
    """Columns of telemetry.csv during training, with ``time_s`` and ``step``, by GPU and ``HOST``."""
    cores: float | None
    """CPUs that the run may use; None if not measured."""
    host_cores: float | None
    """CPUs of the machine; None if not measured."""
    ranks_cores: float = 0.0
    """Cores of the other ranks on the machine, unless the run counts them as its own; nan = unknown."""

    def curve(self, name: str, gpu: int = HOST) -> Series:
        """Returns the readings of a figure, without missing ones."""
        found = self.curves.get(gpu, {}).get(name, _EMPTY)
        return found[np.isfinite(found)]

    def mean(self, name: str, gpu: int = HOST) -> float | None:
        """Returns the mean of `curve`; None without readings."""
        found = self.curve(name, gpu)
        return float(found.mean()) if len(found) else None

    @cached_property
    def others_cores(self) -> Series:
        """Cores of this run that other programs took, by reading; nan if not measured. Other programs that fit on the
        machine's remaining cores take nothing from the run."""
        return self._taken_cores(self.ranks_cores)

    @property
    def mean_others_cores(self) -> float | None:
        """Mean of `others_cores`; None without readings."""
        return _mean_of(self.others_cores)

    @property
    def mean_taken_cores(self) -> float | None:
        """Mean cores of this run that other programs and its other ranks took; None without readings."""
        return _mean_of(self._taken_cores(0.0))

    def _taken_cores(self, ranks_cores: float) -> Series:
        taken = self.curves.get(HOST, {}).get("others_cpu_pct", _EMPTY) / 100
        if self.cores is None:
            return taken
        other_cores = max(0.0, (self.host_cores or self.cores) - self.cores)
        return np.clip(taken - other_cores - ranks_cores, 0.0, self.cores)

    @property
    def gpus(self) -> list[int]:
        """Numbers of the watched GPUs."""
        return sorted(gpu for gpu in self.curves if not is_host(gpu))

    @cached_property
    def util_pct(self) -> float | None:
        """Mean utilisation of the least busy GPU; None without NVML."""
        found = [self.mean("util_pct", gpu) for gpu in self.gpus]
        return min((one for one in found if one is not None), default=None)


def _mean_of(readings: Series) -> float | None:
    known = readings[np.isfinite(readings)]
    return float(known.mean()) if len(known) else None
