"""Stores the monitor's readings: the latest figures, the curves of utilisation, and the means and peaks."""

from __future__ import annotations

import math
import threading
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wellfed.explain.diagnosis.run_tables import Series as Readings
from wellfed.observe.machine_facts import GpuFacts, Holder
from wellfed.observe.telemetry.metrics import SLOW_S
from wellfed.observe.telemetry.series import ENERGY, HOST, Sample

_CURVES = frozenset({"util_pct", "sm_active_pct", "mem_used_gib", "power_w", "cpu_pct"})
"""Figures that the summary at the end has."""
KEPT_READINGS = 100_000
"""Readings of a curve that are kept for the verdict: 14 hours at two a second."""
SILENT_S = 5.0
"""Seconds without a reading after which the last figures are hidden."""


class Curve:
    """Values of one figure over time, in bounded memory."""

    def __init__(self) -> None:
        self._time_s, self._values = array("d"), array("d")
        self.num, self.total, self.peak = 0, 0.0, -math.inf
        """Number, sum and largest of all readings, also of those that are no more kept."""

    def add(self, time_s: float, value: float) -> None:
        """Adds a reading, later than those before."""
        if len(self._time_s) >= 2 * KEPT_READINGS:
            del self._time_s[:KEPT_READINGS], self._values[:KEPT_READINGS]
        self._time_s.append(time_s)
        self._values.append(value)
        self.num, self.total, self.peak = self.num + 1, self.total + value, max(self.peak, value)

    def arrays(self) -> tuple[Readings, Readings]:
        """Returns times in seconds, and values."""
        return np.array(self._time_s), np.array(self._values)


class Board:
    """Readings so far, written by the sampling threads and shown by another."""

    def __init__(self, gpus: Sequence[GpuFacts], *, num_cores: int, ram_gib: float, interval_s: float) -> None:
        """
        Args:
            num_cores: cores of the host. Its CPU time is shown as a share of all of them.
        """
        self.gpus, self.num_cores, self.ram_gib, self.interval_s = gpus, num_cores, ram_gib, interval_s
        self._lock = threading.Lock()
        self._curve_of = {gpu.index: "util_pct" if gpu.has_utilisation else "sm_active_pct" for gpu in gpus}
        self._latest: defaultdict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
        """Figure -> (time, value)."""
        self._read_at_s: dict[int, float] = {}
        self._curves: defaultdict[tuple[int, str], Curve] = defaultdict(Curve)
        self.processes: dict[int, Sequence[Holder]] = {}
        """GPU -> processes with memory on it, the largest first."""

    def add(self, samples: Sequence[Sample]) -> None:
        """Adds a round of readings."""
        with self._lock:
            for sample in samples:
                values = dict(sample.values)
                if sample.gpu == HOST and "cpu_pct" in values:
                    values["cpu_pct"] = min(100.0, values["cpu_pct"] / self.num_cores)
                self._latest[sample.gpu].update({name: (sample.time_s, value) for name, value in values.items()})
                self._read_at_s[sample.gpu] = sample.time_s
                for name in _CURVES & values.keys():
                    self._curves[sample.gpu, name].add(sample.time_s, values[name])

    def latest(self, gpu: int) -> Mapping[str, float]:
        """Returns the figures of a GPU or the host. The host's ``cpu_pct`` is a share of all cores.

        A figure that several of its readings lack is left out: the driver gives it no more.
        """
        with self._lock:
            since_s = self._read_at_s.get(gpu, 0.0) - 3 * max(SLOW_S, self.interval_s)
            return {name: value for name, (time_s, value) in self._latest[gpu].items() if time_s >= since_s}

    def trouble(self, gpu: int, now_s: float) -> str | None:
        """Returns why a GPU has no current figures; None if it has."""
        silent_s = now_s - self._read_at_s.get(gpu, 0.0)
        return f"no reading for {silent_s:.0f} s" if silent_s > max(SILENT_S, 3 * self.interval_s) else None

    def curve(self, gpu: int) -> tuple[Readings, Readings]:
        """Returns times in seconds and percent: utilisation, or SM activity of a MIG instance."""
        with self._lock:
            return self._curves[gpu, self._curve_of.get(gpu, "cpu_pct")].arrays()

    def figures(self, gpu: int) -> dict[str, Any]:
        """Returns ``{util_pct: {mean, max}, ..., energy_j}`` of a GPU or the host since the start."""
        with self._lock:
            curves = {name: curve for (of, name), curve in self._curves.items() if of == gpu and curve.num}
            found: dict[str, Any] = {
                name: {"mean": curve.total / curve.num, "max": curve.peak} for name, curve in curves.items()
            }
            if ENERGY in self._latest[gpu]:
                found[ENERGY] = self._latest[gpu][ENERGY][1]  # counted from the start
        return found
