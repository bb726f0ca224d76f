"""Live figures of a run: the line below the bar, which asks for them when it redraws."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from wellfed.explain.report.figures import utilisation, waiting
from wellfed.observe.telemetry.series import HOST
from wellfed.plan.run_plan import RunPlan
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.units import show_count

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
        """Returns the latest utilisation of the GPUs, and the waiting for data."""
        return [*(self._utilisation() if self._plan.on_gpu else ()), *self._wait()]

    def _utilisation(self) -> Iterator[Text]:
        found: dict[int, list[float]] = {}
        since_s = self._books.journal.time_s() - LATEST_S
        for sample in list(self._books.readings):
            if sample.gpu != HOST and sample.time_s >= since_s and "util_pct" in sample.values:
                found.setdefault(sample.gpu, []).append(sample.values["util_pct"])
        if found:
            yield utilisation([sum(values) / len(values) for values in found.values()]).cell

    def _wait(self) -> Iterator[Text]:
        recent = self._books.journal.recent(_LATEST_STEPS)
        if recent is not None:
            frac = float(recent.column("wait_ms").sum()) / float(recent.step_ms.sum())
            yield waiting(frac).cell
