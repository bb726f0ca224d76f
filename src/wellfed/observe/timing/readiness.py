"""Computes the figures of a run from its step rows: rate with its interval, shares of time, readiness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from wellfed.observe.timing.interval import half_width
from wellfed.observe.timing.step_clock import COMPUTE_PHASES, PHASE_COLUMNS, READY_FRAC, READY_MS, StepRow
from wellfed.record import LoadingEntry, Throughput, TimeEntry

Column = np.ndarray[Any, np.dtype[np.float64]]
_COMPLETE = ("samples", "wait_ms", "compute_ms", "host_ms", "asked_wait_ms")
"""Columns without gaps."""


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
    """Mean milliseconds to build a batch; None if unknown, like the next ones."""
    build_ms_p50: float | None = None
    build_ms_p99: float | None = None
    build_cpu_frac: float | None = None
    """CPU time over wall time of building."""
    forward_frac: float | None = None
    """Share of the forward passes in the steps, a part of `compute_frac` on the same clock; None if unknown."""
    backward_frac: float | None = None
    optimizer_frac: float | None = None
    forward_ms: float | None = None
    """Mean time of the host in the forward passes of a step; None if unknown."""
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    device_forward_ms: float | None = None
    """Mean on the device's clock, over the steps whose phases it timed; None on a CPU."""
    device_backward_ms: float | None = None
    device_optimizer_ms: float | None = None
    phase_steps: int | None = None
    """Steps whose phases were timed by the clock of the shares; None if none were."""

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


@dataclass(frozen=True)
class StepColumns:
    """Columns of several rows; all arrays have one entry a row, in milliseconds."""

    samples: Column
    wait_ms: Column
    copy_ms: Column | None
    """None where there is no copy to a device; 0 for a step without one."""
    compute_ms: Column
    host_ms: Column
    asked_wait_ms: Column
    phases_ms: Mapping[str, Column]
    """Columns of `PHASE_COLUMNS` with at least one figure; ``nan`` for a step without."""

    @classmethod
    def of(cls, rows: Sequence[StepRow]) -> StepColumns:
        """Returns the columns of at least one row."""
        columns = dict(zip(StepRow._fields, zip(*rows, strict=True), strict=True))
        copies = columns["copy_ms"]
        has_copy = copies.count(None) < len(copies)
        return cls(
            copy_ms=np.array([ms or 0.0 for ms in copies]) if has_copy else None,
            phases_ms={
                name: np.array(columns[name], dtype=float)
                for name in PHASE_COLUMNS
                if columns[name].count(None) < len(rows)
            },
            **{name: np.array(columns[name], dtype=float) for name in _COMPLETE},
        )

    @cached_property
    def step_ms(self) -> Column:
        """Wall time of each step, as `StepRow.step_ms`."""
        copy_ms: Column | float = 0.0 if self.copy_ms is None else self.copy_ms
        return cast(Column, self.wait_ms + copy_ms + self.compute_ms + self.host_ms)

    @property
    def samples_per_s(self) -> float | None:
        """Rate of all rows; None if they took no time."""
        total_ms = float(self.step_ms.sum())
        return 1e3 * float(self.samples.sum()) / total_ms if total_ms > 0 else None

    @property
    def readiness_frac(self) -> float:
        """Share of the steps whose batch was ready, as `StepRow.ready`."""
        return float((self.asked_wait_ms <= np.maximum(READY_MS, READY_FRAC * self.step_ms)).mean())


def summarise(rows: Sequence[StepRow]) -> StepSummary | None:
    """Returns the figures of the rows that are not warm-up; None if there are none."""
    kept = [row for row in rows if not row.warmup]
    columns = StepColumns.of(kept) if kept else None
    rate = None if columns is None else columns.samples_per_s
    if columns is None or rate is None:
        return None
    total_ms, copy_ms = float(columns.step_ms.sum()), columns.copy_ms
    p50, p95 = np.quantile(columns.step_ms, (0.50, 0.95))
    half = half_width(columns.samples.tolist(), (columns.step_ms / 1e3).tolist())
    launches = [row.launch_ms for row in kept if row.launch_ms is not None]
    return StepSummary(
        steps=len(kept),
        warmup_steps=len(rows) - len(kept),
        samples_per_s=rate,
        ci95=None if half is None else (max(0.0, rate - half), rate + half),
        readiness_frac=columns.readiness_frac,
        wait_frac=float(columns.wait_ms.sum()) / total_ms,
        copy_frac=None if copy_ms is None else float(copy_ms.sum()) / total_ms,
        compute_frac=float(columns.compute_ms.sum()) / total_ms,
        host_frac=float(columns.host_ms.sum()) / total_ms,
        step_ms_mean=total_ms / len(kept),
        step_ms_p50=float(p50),
        step_ms_p95=float(p95),
        launch_ms_p50=float(np.median(launches)) if launches else None,
        **_phases(columns, float(columns.compute_ms.sum()) / total_ms),
        **_building([(row.build_ms, row.build_cpu_ms or 0.0) for row in kept if row.build_ms is not None]),
    )


def _phases(columns: StepColumns, compute_frac: float) -> dict[str, Any]:
    """Returns the mean time of each phase, and its share of the steps by the clock of the compute time."""
    found: dict[str, Any] = {name: float(np.nanmean(column)) for name, column in columns.phases_ms.items()}
    clock = "" if columns.copy_ms is None else "device_"
    for phase in COMPUTE_PHASES:
        if (column := columns.phases_ms.get(f"{clock}{phase}_ms")) is not None:
            is_timed = np.isfinite(column)
            compute_ms = float(columns.compute_ms[is_timed].sum())
            if compute_ms > 0:
                found["phase_steps"] = int(is_timed.sum())
                found[f"{phase}_frac"] = compute_frac * float(np.nansum(column)) / compute_ms
    return found


def _building(times_ms: Sequence[tuple[float, float]]) -> dict[str, Any]:
    if not times_ms:
        return {}
    built_ms, cpu_ms = np.array(times_ms).T
    p50, p99 = np.quantile(built_ms, (0.50, 0.99))
    found = {"build_ms_mean": built_ms.mean(), "build_ms_p50": p50, "build_ms_p99": p99}
    if built_ms.sum() > 0:
        found["build_cpu_frac"] = cpu_ms.sum() / built_ms.sum()
    return {name: float(value) for name, value in found.items()}
