"""Computes the figures of a run from its step rows: rate with its interval, shares of time, readiness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from wellfed.observe.timing.interval import half_width
from wellfed.observe.timing.step_clock import COMPUTE_PHASES, PHASE_COLUMNS, READY_FRAC, READY_MS, StepRow
from wellfed.record.entries import LoadingEntry, Throughput, TimeEntry

Column = np.ndarray[Any, np.dtype[np.float64]]
_PLACES = {name: place for place, name in enumerate(StepRow._fields)}


@dataclass(frozen=True)
class StepSummary:
    """Figures of the steps after the warm-up."""

    steps: int
    warmup_steps: int
    samples_per_s: float
    ci95: tuple[float, float] | None
    """95 % interval of samples_per_s; None with too few steps (see `interval`)."""
    readiness_frac: float
    time: TimeEntry
    loading: LoadingEntry
    """Empty if it is unknown what building a batch took."""

    def throughput(self, sample_unit: str) -> Throughput:
        """Returns the entry of run.json."""
        return {
            "samples_per_s": self.samples_per_s,
            "ci95": list(self.ci95) if self.ci95 else None,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "sample_unit": sample_unit,
        }


class StepTable:
    """Rows of the latest steps, held as one array: a run of many steps keeps no object for each figure."""

    def __init__(self, most: int | None = None, figures: Column | None = None) -> None:
        """
        Args:
            most: maximum number of rows; beyond it the oldest are dropped. None = no limit.
            figures: rows to begin with, as in `figures`.
        """
        self._array = _figures(()) if figures is None else figures
        self._most, self._end = most, len(self._array)

    @classmethod
    def of(cls, rows: Rows) -> StepTable:
        """Returns a table of rows."""
        return rows if isinstance(rows, StepTable) else cls(figures=_figures(rows))

    @classmethod
    def of_columns(cls, columns: Mapping[str, Column]) -> StepTable:
        """Returns a table from columns of steps.csv, which has ``ready`` in place of the wait that decides it."""
        figures = np.full((len(columns["step"]), len(_PLACES)), np.nan)
        for name in _PLACES.keys() & columns.keys():
            figures[:, _PLACES[name]] = columns[name]
        figures[:, _PLACES["warmup"]] = np.nan_to_num(figures[:, _PLACES["warmup"]])
        figures[:, _PLACES["asked_wait_ms"]] = np.where(columns["ready"] == 1, 0.0, np.inf)
        return cls(figures=figures)

    @property
    def figures(self) -> Column:
        """One row a step, the fields of `StepRow` as columns, ``nan`` for None."""
        return self._array[self._end - len(self) : self._end]

    def extend(self, rows: Sequence[StepRow]) -> None:
        """Adds rows."""
        new = _figures(rows)
        if self._end + len(new) > len(self._array):
            kept = self.figures  # an array of its own follows, since figures may be in use
            self._array, self._end = np.empty((9 * (len(kept) + len(new)) // 8 + 1, len(_PLACES))), len(kept)
            self._array[: len(kept)] = kept
        self._array[self._end : self._end + len(new)] = new
        self._end += len(new)

    def __len__(self) -> int:
        return self._end if self._most is None else min(self._end, self._most)

    def latest(self, number: int) -> StepTable:
        """Returns up to this number of the last rows."""
        return StepTable(figures=self.figures[-number:])

    def after(self, number: int) -> StepTable:
        """Returns the rows without this number of the first."""
        return StepTable(figures=self.figures[number:])

    def steady(self) -> StepTable:
        """Returns the rows that are not warm-up."""
        return StepTable(figures=self.figures[self.column("warmup") == 0])

    def column(self, name: str) -> Column:
        """Returns a field of `StepRow` for each row, ``nan`` for None."""
        return self.figures[:, _PLACES[name]]

    def known(self, name: str) -> Column:
        """Returns the figures of a field, without the rows that lack it."""
        column = self.column(name)
        return column[np.isfinite(column)]

    @property
    def has_copies(self) -> bool:
        """Whether batches are copied to a device."""
        return len(self.known("copy_ms")) > 0

    @property
    def step_ms(self) -> Column:
        """Wall time of each step, as `StepRow.step_ms`."""
        times_ms = (self.column(name) for name in ("wait_ms", "compute_ms", "host_ms"))
        return cast(Column, sum(times_ms, np.nan_to_num(self.column("copy_ms"))))

    @property
    def samples_per_s(self) -> float | None:
        """Rate of all rows; None if they took no time."""
        total_ms = float(self.step_ms.sum())
        return 1e3 * float(self.column("samples").sum()) / total_ms if total_ms > 0 else None

    @property
    def ready(self) -> Column:
        """Whether the batch of each step was ready, as `StepRow.ready`."""
        is_ready = self.column("asked_wait_ms") <= np.maximum(READY_MS, READY_FRAC * self.step_ms)
        return cast(Column, is_ready.astype(float))

    def means_ms(self) -> dict[str, float]:
        """Returns the mean of each time that any row has. A step without a copy copies for 0 ms."""
        names = ("wait_ms", "copy_ms", "compute_ms", "host_ms", *PHASE_COLUMNS)
        means = {name: float(known.mean()) for name in names if len(known := self.known(name))}
        if self.has_copies:
            means["copy_ms"] = float(np.nansum(self.column("copy_ms"))) / len(self)
        return means


Rows = Sequence[StepRow] | StepTable


def _figures(rows: Iterable[StepRow]) -> Column:
    return np.array(list(rows), dtype=float).reshape(-1, len(_PLACES))


def summarise(rows: Rows) -> StepSummary | None:
    """Returns the figures of the rows that are not warm-up; None if there are none."""
    every = StepTable.of(rows)
    kept = every.steady()
    rate, step_ms = kept.samples_per_s, kept.step_ms
    if rate is None:
        return None
    total_ms = float(step_ms.sum())
    p50, p95 = np.quantile(step_ms, (0.50, 0.95))
    half = half_width(kept.column("samples").tolist(), (step_ms / 1e3).tolist())
    fracs = {
        f"{name}_frac": float(np.nansum(kept.column(f"{name}_ms"))) / total_ms
        for name in ("wait", "copy", "compute", "host")
    }
    launches = kept.known("launch_ms")
    return StepSummary(
        steps=len(kept),
        warmup_steps=len(every) - len(kept),
        samples_per_s=rate,
        ci95=None if half is None else (max(0.0, rate - half), rate + half),
        readiness_frac=float(kept.ready.mean()),
        time={
            **fracs,  # type: ignore[typeddict-item]
            "copy_frac": fracs["copy_frac"] if kept.has_copies else None,
            "step_ms_mean": total_ms / len(kept),
            "step_ms_p50": float(p50),
            "step_ms_p95": float(p95),
            "launch_ms_p50": float(np.median(launches)) if len(launches) else None,
            **_phases(kept, fracs["compute_frac"]),
        },
        loading=_building(kept),
    )


def _phases(columns: StepTable, compute_frac: float) -> dict[str, Any]:
    """Returns the mean time of each phase, and its share of the steps by the clock of the compute time."""
    means_ms = columns.means_ms()
    found: dict[str, Any] = {name: means_ms.get(name) for name in PHASE_COLUMNS}
    found |= dict.fromkeys(("phase_steps", *(f"{phase}_frac" for phase in COMPUTE_PHASES)))
    for phase in COMPUTE_PHASES:
        column = columns.column(f"{'device_' if columns.has_copies else ''}{phase}_ms")
        is_timed = np.isfinite(column)
        if (compute_ms := float(columns.column("compute_ms")[is_timed].sum())) > 0:
            found["phase_steps"] = int(is_timed.sum())
            found[f"{phase}_frac"] = compute_frac * float(column[is_timed].sum()) / compute_ms
    return found


def _building(columns: StepTable) -> LoadingEntry:
    built_ms = columns.known("build_ms")
    if not len(built_ms):
        return {}
    p50, p99 = map(float, np.quantile(built_ms, (0.50, 0.99)))
    found: LoadingEntry = {"build_ms_mean": float(built_ms.mean()), "build_ms_p50": p50, "build_ms_p99": p99}
    if built_ms.sum() > 0:
        cpu_ms = np.nansum(columns.column("build_cpu_ms")[np.isfinite(columns.column("build_ms"))])
        found["cpu_frac"] = float(cpu_ms / built_ms.sum())
    return found
