"""Live figures of a run: the line below the bar, which asks for them when it redraws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import waiting_colour
from wellfed.explain.diagnosis.thresholds import OTHERS_FRAC
from wellfed.explain.report.last_screen import show_of_budget, show_utilisation
from wellfed.observe.telemetry.metrics import SLOW_S
from wellfed.observe.telemetry.series import HOST, Sample
from wellfed.plan.run_plan import RunPlan
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.units import show_count, show_gib

LATEST_S, LATEST_POWER_S = 5.0, 3 * SLOW_S
"""Seconds of readings that the line covers, and of power, which is read less often."""
_LATEST_STEPS = 50


class LiveStatus:
    """Status of a training that lasts; costs nothing between two calls."""

    def __init__(self, books: Bookkeeper, plan: RunPlan, unit: str) -> None:
        """``unit``: name of the samples."""
        self._books, self._plan, self._unit = books, plan, unit

    def rate(self) -> str:
        """Returns samples/s of the latest steps; empty if unknown."""
        recent = self._books.journal.recent(_LATEST_STEPS)
        rate = None if recent is None else recent.samples_per_s
        return f"{show_count(rate)} {self._unit}/s" if rate else ""

    def parts(self) -> list[Text]:
        """Returns the latest figures of the device and of the host, with the waiting for data."""
        now_s, readings = self._books.journal.time_s(), list(self._books.readings)
        latest = [sample for sample in readings if sample.time_s >= now_s - LATEST_S]
        if not self._plan.on_gpu:
            return [*self._host(latest), *self._wait()]
        return [
            *self._lost(),
            *self._utilisation(latest),
            *self._wait(),
            *self._memory(),
            *self._power(readings, now_s),
        ]

    def _wait(self) -> Iterator[Text]:
        recent = self._books.journal.recent(_LATEST_STEPS)
        if recent is not None:
            frac = float(recent.column("wait_ms").sum()) / float(recent.step_ms.sum())
            yield Text(f"wait {100 * frac:.0f} %", waiting_colour(frac))

    def _utilisation(self, latest: Sequence[Sample]) -> Iterator[Text]:
        by_gpu: dict[int, list[float]] = {}
        for sample in latest:
            if "util_pct" in sample.values and sample.gpu != HOST:
                by_gpu.setdefault(sample.gpu, []).append(sample.values["util_pct"])
        yield from show_utilisation([sum(values) / len(values) for values in by_gpu.values()])

    def _memory(self) -> Iterator[Text]:
        held_gib = self._books.held_gib()
        if held_gib is not None:
            yield Text(f"mem {show_of_budget(held_gib, self._plan.device.memory_gib)}")

    def _power(self, readings: Sequence[Sample], now_s: float) -> Iterator[Text]:
        latest = [one for one in readings if one.time_s >= now_s - LATEST_POWER_S and one.gpu != HOST]
        watts = {one.gpu: one.values["power_w"] for one in latest if "power_w" in one.values}
        if watts:
            yield Text(f"{sum(watts.values()):.0f} W")

    def _lost(self) -> Iterator[Text]:
        if lost := [str(event.get("gpu")) for event in self._books.record.events if event["kind"] == "gpu_lost"]:
            yield Text(f"GPU {', '.join(lost)} lost", "bold red")

    def _host(self, latest: Sequence[Sample]) -> Iterator[Text]:
        """Yields cores and memory of the run, and the cores of other programs."""
        values = {name: value for sample in latest if sample.gpu == HOST for name, value in sample.values.items()}
        cores = self._books.record.machine.get("cpu_quota_cores")
        if "cpu_pct" in values:
            of = "" if cores is None else f" of {cores:.3g}"
            yield Text(f"CPU {values['cpu_pct'] / 100:.1f}{of} cores")
        others_pct = np.array([one.values.get("others_cpu_pct", np.nan) for one in latest if one.gpu == HOST])
        of_host = {HOST: {"others_cpu_pct": others_pct}}
        others = Evidence(self._books.record, {}, of_host).telemetry.mean_others_cores
        if others is not None:
            is_much = cores is not None and others >= OTHERS_FRAC * cores
            yield Text(f"other programs {others:.1f}", "yellow" if is_much else "")
        if "rss_gib" in values:
            yield Text(f"mem {show_gib(values['rss_gib'])}")
