"""Keeps what the monitor has read: the latest figures, the curves, and the means and peaks."""

from __future__ import annotations

import math
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from wellfed.explain.diagnosis.run_tables import Series as Readings
from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.telemetry.machines import HOST
from wellfed.observe.telemetry.series import Sample, Series
from wellfed.observe.telemetry.summary import Summary

KEPT_READINGS = 100_000
"""Readings kept of a curve for the verdict: 14 hours at two a second."""
SILENT_S = 5.0
"""Without a reading for so long, the figures that were read last are not shown any more."""


class Curve:
    """One figure over time, in bounded memory."""

    def __init__(self) -> None:
        self._time_s, self._values = array("d"), array("d")

    def add(self, time_s: float, value: float) -> None:
        """A reading, later than those before."""
        if len(self._time_s) >= 2 * KEPT_READINGS:
            del self._time_s[:KEPT_READINGS], self._values[:KEPT_READINGS]
        self._time_s.append(time_s)
        self._values.append(value)

    def arrays(self) -> tuple[Readings, Readings]:
        """Times in seconds, and values."""
        return np.array(self._time_s), np.array(self._values)

    def cells(self, now_s: float, cell_s: float, num: int) -> list[float | None]:
        """The means of the latest ``num`` stretches of ``cell_s`` that are over; None = no reading in it.

        One empty cell between two others has the value before it: readings don't come to the instant.
        """
        last, found = math.floor(now_s / cell_s) - 1, [list[float]() for _ in range(num)]
        for place in range(len(self._time_s) - 1, -1, -1):
            age = last - math.floor(self._time_s[place] / cell_s)
            if age >= num:
                break
            if age >= 0:
                found[num - 1 - age].append(self._values[place])
        means = [sum(values) / len(values) if values else None for values in found]
        between = zip(means, means[1:], means[2:], strict=False)
        filled = [before if here is None and after is not None else here for before, here, after in between]
        return [*means[:1], *filled, *means[1:][-1:]]


class Board:
    """Readings so far, written by the sampling threads and shown by another."""

    def __init__(
        self,
        gpus: Sequence[SeenGpu],
        *,
        num_cores: int,
        interval_s: float,
        trained_s: Callable[[float, float], float],
    ) -> None:
        """
        Args:
            num_cores: of the host; its CPU time is shown as a share of all of them.
            trained_s: seconds that count between two times.
        """
        self._lock = threading.Lock()
        self._curve_of = {gpu.index: "util_pct" if gpu.has_utilisation else "sm_active_pct" for gpu in gpus}
        self._num_cores, self._silent_s = num_cores, max(SILENT_S, 3 * interval_s)
        self._summary, self._trained_s = Summary(trained_s), trained_s
        self._latest: defaultdict[int, dict[str, float]] = defaultdict(dict)
        self._read_at_s: dict[int, float] = {}
        self._curves: defaultdict[int, Curve] = defaultdict(Curve)
        self._host: defaultdict[str, Series] = defaultdict(Series)
        self._lost: set[int] = set()

    def add(self, samples: Sequence[Sample]) -> None:
        """A round of readings."""
        self._summary.add(samples)
        with self._lock:
            for sample in samples:
                values = dict(sample.values)
                if sample.gpu == HOST:
                    if "cpu_pct" in values:
                        values["cpu_pct"] = min(100.0, values["cpu_pct"] / self._num_cores)
                    for name, figure in values.items():
                        self._host[name].add(figure)
                self._latest[sample.gpu].update(values)
                self._read_at_s[sample.gpu] = sample.time_s
                if (value := values.get(self._curve_of.get(sample.gpu, "cpu_pct"))) is not None:
                    self._curves[sample.gpu].add(sample.time_s, value)

    def lose(self, gpu: int) -> None:
        """It has no figures until it is back."""
        with self._lock:
            self._lost.add(gpu)
            self._latest.pop(gpu, None)

    def regain(self, gpu: int) -> None:
        """It is back."""
        with self._lock:
            self._lost.discard(gpu)

    def latest(self, gpu: int) -> Mapping[str, float]:
        """Figures of a GPU, or of the host, where ``cpu_pct`` is a share of all cores."""
        with self._lock:
            return dict(self._latest.get(gpu, {}))

    def trouble(self, gpu: int, now_s: float) -> str | None:
        """Why there is nothing to show of a GPU at the moment."""
        with self._lock:
            if gpu in self._lost:
                return "lost; looked for again from time to time"
            silent_s = now_s - self._read_at_s.get(gpu, 0.0)
            return f"no reading for {silent_s:.0f} s" if silent_s > self._silent_s else None

    def cells(self, gpu: int, now_s: float, cell_s: float, num: int) -> list[float | None]:
        """The latest of a curve; see `Curve.cells`."""
        with self._lock:
            return self._curves[gpu].cells(now_s, cell_s, num)

    def curve(self, gpu: int) -> tuple[Readings, Readings]:
        """Times in seconds and percent: utilisation of a GPU, or of the multiprocessors of an instance."""
        with self._lock:
            return self._curves[gpu].arrays()

    def gpus(self, now_s: float) -> dict[str, dict[str, Any]]:
        """Returns ``gpus`` as in run.json: ``{"0": {util_pct: {mean, p5, p50, p95, max, n}, ..., energy_j}}``."""
        return self._summary.entry(0, self._trained_s(0.0, now_s))

    def host(self) -> dict[str, dict[str, float]]:
        """``{cpu_pct: {mean, ..., max, n}, mem_used_gib: ..., iowait_pct: ...}``; cpu_pct of all cores."""
        with self._lock:
            return {name: series.entry() for name, series in self._host.items()}
