"""Live figures of a run: the line below the bar, which asks for them when it redraws."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from wellfed.explain.report.figures import memory_of, utilisation, waiting
from wellfed.observe.telemetry.series import HOST
from wellfed.plan.run_plan import RunPlan
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.units import show_count, show_gib

LATEST_S = 5.0
"""Seconds of readings that the line covers."""
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
        """Returns the latest figures of the device or the host, with the waiting for data."""
        return [*(self._utilisation() if self._plan.on_gpu else self._cpu()), *self._wait(), *self._memory()]

    def _latest(self, name: str, *, of_host: bool) -> dict[int, list[float]]:
        """Returns the latest readings of a metric, by GPU."""
        found: dict[int, list[float]] = {}
        now_s = self._books.journal.time_s()
        for sample in list(self._books.readings):
            if (sample.gpu == HOST) == of_host and sample.time_s >= now_s - LATEST_S and name in sample.values:
                found.setdefault(sample.gpu, []).append(sample.values[name])
        return found

    def _utilisation(self) -> Iterator[Text]:
        readings = self._latest("util_pct", of_host=False).values()
        if readings:
            yield utilisation([sum(values) / len(values) for values in readings]).cell

    def _cpu(self) -> Iterator[Text]:
        cores = self._books.record.machine.get("cpu_quota_cores")
        for values in self._latest("cpu_pct", of_host=True).values():
            of = "" if cores is None else f" of {cores:.3g}"
            yield Text(f"CPU {values[-1] / 100:.1f}{of} cores")

    def _wait(self) -> Iterator[Text]:
        recent = self._books.journal.recent(_LATEST_STEPS)
        if recent is not None:
            frac = float(recent.column("wait_ms").sum()) / float(recent.step_ms.sum())
            yield waiting(frac).cell

    def _memory(self) -> Iterator[Text]:
        if not self._plan.on_gpu:
            for values in self._latest("rss_gib", of_host=True).values():
                yield Text(f"mem {show_gib(values[-1])}")
        elif (held_gib := self._books.held_gib()) is not None:
            yield Text(f"mem {memory_of('', held_gib, self._plan.device.memory_gib).text}")
