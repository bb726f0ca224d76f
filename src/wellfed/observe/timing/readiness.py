"""Computes the figures of a run from its step rows: rate with its interval, shares of time, readiness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from wellfed.observe.timing.interval import half_width
from wellfed.observe.timing.step_clock import StepRow
from wellfed.record import LoadingEntry, Throughput, TimeEntry


@dataclass(frozen=True)
class StepSummary:
    """Figures of the steps after the warm-up."""

    steps: int
    warmup_steps: int
    samples_per_s: float
    ci95: tuple[float, float] | None
    """95 % interval of samples_per_s; None with too few steps (see `interval`)."""
    readiness_frac: float
    wait_frac: float
    copy_frac: float | None
    """None where nothing is copied to a device."""
    compute_frac: float
    host_frac: float
    step_ms_mean: float
    step_ms_p50: float
    step_ms_p95: float
    launch_ms_p50: float | None = None
    """None on a CPU."""
    build_ms_mean: float | None = None
    """Mean milliseconds to build a batch; None if unknown, like the next three."""
    build_ms_p50: float | None = None
    build_ms_p99: float | None = None
    build_cpu_frac: float | None = None
    """CPU time over wall time of building."""

    def throughput(self, sample_unit: str) -> Throughput:
        """Returns the entry of run.json."""
        return {
            "samples_per_s": self.samples_per_s,
            "ci95": list(self.ci95) if self.ci95 else None,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "sample_unit": sample_unit,
        }

    def time(self) -> TimeEntry:
        """Returns the entry of run.json."""
        return cast(TimeEntry, {name: getattr(self, name) for name in TimeEntry.__annotations__})

    def loading(self) -> LoadingEntry:
        """Returns the entry of run.json on building batches; empty if unknown."""
        found = {
            "build_ms_mean": self.build_ms_mean,
            "build_ms_p50": self.build_ms_p50,
            "build_ms_p99": self.build_ms_p99,
            "cpu_frac": self.build_cpu_frac,
        }
        return cast(LoadingEntry, {name: value for name, value in found.items() if value is not None})


def summarise(rows: Sequence[StepRow]) -> StepSummary | None:
    """Returns the figures of the rows that are not warm-up; None if there are none."""
    kept = [row for row in rows if not row.warmup]
    total_ms = sum(row.step_ms for row in kept)
    if not kept or total_ms <= 0:
        return None
    p50, p95 = np.quantile([row.step_ms for row in kept], (0.50, 0.95))
    rate = 1e3 * sum(row.samples for row in kept) / total_ms
    half = half_width([row.samples for row in kept], [row.step_ms / 1e3 for row in kept])
    launches = [row.launch_ms for row in kept if row.launch_ms is not None]
    has_copy = any(row.copy_ms is not None for row in kept)
    return StepSummary(
        steps=len(kept),
        warmup_steps=len(rows) - len(kept),
        samples_per_s=rate,
        ci95=None if half is None else (max(0.0, rate - half), rate + half),
        readiness_frac=sum(row.ready for row in kept) / len(kept),
        wait_frac=sum(row.wait_ms for row in kept) / total_ms,
        copy_frac=sum(row.copy_ms or 0.0 for row in kept) / total_ms if has_copy else None,
        compute_frac=sum(row.compute_ms for row in kept) / total_ms,
        host_frac=sum(row.host_ms for row in kept) / total_ms,
        step_ms_mean=total_ms / len(kept),
        step_ms_p50=float(p50),
        step_ms_p95=float(p95),
        launch_ms_p50=float(np.median(launches)) if launches else None,
        **_building([(row.build_ms, row.build_cpu_ms or 0.0) for row in kept if row.build_ms is not None]),
    )


def _building(times_ms: Sequence[tuple[float, float]]) -> dict[str, float]:
    if not times_ms:
        return {}
    built_ms, cpu_ms = np.array(times_ms).T
    p50, p99 = np.quantile(built_ms, (0.50, 0.99))
    found = {"build_ms_mean": built_ms.mean(), "build_ms_p50": p50, "build_ms_p99": p99}
    if built_ms.sum() > 0:
        found["build_cpu_frac"] = cpu_ms.sum() / built_ms.sum()
    return {name: float(value) for name, value in found.items()}
