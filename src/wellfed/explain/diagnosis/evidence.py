"""Gathers all recorded facts of a run in one object that the rules of the diagnosis read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wellfed.explain.diagnosis.compute_phases import phase_shares, phases_ms
from wellfed.explain.diagnosis.curves.swing import StepSwing, Swing, lags_of, swing_in_time, swings_in_steps
from wellfed.explain.diagnosis.run_tables import PHASES, Series, columns, curves, metric_curves, passes_ended
from wellfed.explain.diagnosis.thresholds import SLOW_START_S
from wellfed.observe.telemetry.machines import HOST, is_host, named
from wellfed.observe.telemetry.series import TRAINING
from wellfed.observe.timing.readiness import summarise
from wellfed.observe.timing.step_clock import PHASE_COLUMNS, StepRow
from wellfed.observe.timing.wall import hooks_within_steps_s
from wellfed.record import RunRecord, TimeEntry, WallEntry

_OF_STEPS = (
    *("step", "time_s", "epoch", "samples", "micro_batch", "num_micro", "wait_ms", "copy_ms", "compute_ms", "host_ms"),
    *("ready", "build_ms", "build_cpu_ms", "launch_ms", "slowest_ms", "slowest_index", *PHASE_COLUMNS),
)
_OF_GPUS = (
    *("util_pct", "mem_used_gib", "sm_active_pct", "tensor_active_pct", "dram_active_pct"),
    *("pcie_rx_mb_s", "sm_clock_mhz", "power_limited", "heat_limited", "power_w", "temp_c"),
)
_OF_HOST = ("cpu_pct", "rss_gib", "iowait_pct", "others_cpu_pct", "loader_cpu_pct")
_PARTS_MS = ("wait_ms", "copy_ms", "compute_ms", "host_ms")
"""Columns whose sum is a step's time."""
_PAUSES = ("validate", "checkpoint")
"""Phases that interrupt training."""
_EMPTY = np.empty(0)
_WARMUP = 3
"""Warm-up steps of a process, as in `wellfed.train.lightning.callbacks.clock`."""
_READINGS = 4
"""Minimum readings of the utilisation in a period that they can show."""
_LATEST = 10_000
"""Number of latest steps used for a record without figures."""


@dataclass(frozen=True)
class Evidence:
    """Record and tables of a run. A figure that was not measured is None, an empty column or nan, never 0."""

    record: RunRecord
    all_steps: Mapping[str, Series] = field(default_factory=dict)
    """Columns of steps.csv, warm-up included; all equally long, or empty."""
    curves: Mapping[int, Mapping[str, Series]] = field(default_factory=dict)
    """Columns of telemetry.csv during training, with ``time_s`` and ``step``, by GPU and ``HOST``."""
    losses: tuple[Series, Series] = (_EMPTY, _EMPTY)
    """Steps and values of the logged training loss."""
    watched: Mapping[int, Mapping[str, Series]] = field(default_factory=dict)
    """`curves` of all phases, with ``phase`` (an index of `PHASES`). For pictures, not for rules."""
    metrics: Mapping[tuple[str, str], tuple[Series, Series]] = field(default_factory=dict)
    """Steps and values of all metrics, by split and name."""
    ended: Mapping[str, Series] = field(default_factory=dict)
    """End of each pass over ``val`` and ``test``, seconds since the run started."""

    @classmethod
    def of(cls, record: RunRecord, folder: Path) -> Evidence:
        """Reads the tables beside a record; unreadable ones are left out. Figures that the record lacks come from the
        tables. While a run lasts, they are newer there than in the record of its last checkpoint."""
        table = columns(folder / "steps.csv", _OF_STEPS)
        if record.status == "running" and len(table["step"]):
            record = replace(record, throughput=None, time=None, readiness_frac=None, gpus={}, ceiling=None)
        in_training = PHASES.index("train")
        watched, metrics = curves(folder, ("time_s", "step", *_OF_GPUS, *_OF_HOST)), metric_curves(folder)
        return cls(
            record if record.throughput else _with_watched(_with_figures(record, table), watched),
            table,
            {
                gpu: {name: column[curve["phase"] == in_training] for name, column in curve.items()}
                for gpu, curve in watched.items()
                if np.any(curve["phase"] == in_training)
            },
            metrics.get(("train", "loss"), (_EMPTY, _EMPTY)),
            watched,
            metrics,
            passes_ended(folder),
        )

    @classmethod
    def read(cls, folder: Path) -> Evidence:
        """Reads a run folder. Raises as `wellfed.record.read` does."""
        return cls.of(RunRecord.read(folder), folder)

    # Requested settings

    def value(self, knob: str) -> Any:
        """Returns a knob as planned, else as configured; None if neither has it."""
        if knob in self.record.plan:
            return self.record.plan[knob]["value"]
        found: Any = self.record.config
        for name in knob.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    @cached_property
    def first_metrics(self) -> Mapping[str, float]:
        """First value of each metric that has several, as ``split/name``."""
        return {"/".join(key): float(values[0]) for key, (_, values) in self.metrics.items() if len(values) > 1}

    @property
    def num_workers(self) -> int:
        """Threads or processes that build batches; 0 = the training process does."""
        return int(self.value("loader.num_workers") or 0)

    @property
    def cores(self) -> float | None:
        """CPUs that this run may use; None if not measured."""
        return self.record.machine.get("cpu_quota_cores")

    @property
    def on_gpu(self) -> bool:
        """Whether the run trained on a GPU."""
        return self.record.time is not None and self.record.time["copy_frac"] is not None

    # Measured steps, without the warm-up

    @cached_property
    def num_measured(self) -> int:
        """Number of steps behind the figures of the record; 0 without figures."""
        return self.record.throughput["steps"] if self.record.throughput else 0

    @cached_property
    def steps(self) -> Mapping[str, Series]:
        """Columns of steps.csv without the warm-up."""
        warmup = self.record.throughput["warmup_steps"] if self.record.throughput else 0
        return {name: column[warmup:] for name, column in self.all_steps.items()}

    def column(self, name: str) -> Series:
        """Returns a column of `steps`, ``nan`` for a step without a figure; empty if the table lacks the column."""
        return self.steps.get(name, _EMPTY)

    @cached_property
    def wait_ms(self) -> Series:
        """Milliseconds each step waited for its batch."""
        return np.nan_to_num(self.column("wait_ms"))

    @cached_property
    def rest_ms(self) -> Series:
        """Milliseconds of the rest of each step: copy, compute and host."""
        return _took_ms(self.steps, _PARTS_MS[1:])

    @cached_property
    def all_ms(self) -> Series:
        """Milliseconds of each step, warm-up included."""
        return _took_ms(self.all_steps, _PARTS_MS)

    @cached_property
    def all_phases_ms(self) -> Mapping[str, Series]:
        """Milliseconds of compute of each step by phase, warm-up included; see `compute_phases.phases_ms`."""
        return phases_ms(self.all_steps)

    @cached_property
    def gap_ms(self) -> Series:
        """Milliseconds before each step outside of all steps: a validation, a checkpoint, the end of an epoch.

        A step's ``time_s`` is the host's, which runs ahead of a GPU. So this clock lags behind the sum of the steps
        until the host waits for the device. Only a lead beyond the largest so far is a gap.
        """
        ended_at_ms, number = 1e3 * self.column("time_s"), len(self.wait_ms)
        if number == 0 or len(ended_at_ms) != number:
            return np.zeros(number)
        ahead_ms = ended_at_ms - np.cumsum(self.wait_ms + self.rest_ms)
        return np.diff(np.maximum.accumulate(ahead_ms), prepend=ahead_ms[0])

    @cached_property
    def wall(self) -> WallEntry | None:
        """Wall time of training by kind, from the record or else derived from the tables; None if both are empty."""
        if self.record.wall is not None or not len(self.all_steps.get("wait_ms", ())):
            return self.record.wall
        steps_s, between_s = float(self.all_ms.sum()) / 1e3, float(self.gap_ms.sum()) / 1e3
        phases = self.record.phases
        validation_s, checkpoint_s = (phases[one]["total_s"] if one in phases else 0.0 for one in _PAUSES)
        other_s = max(0.0, between_s - validation_s - checkpoint_s)
        return {
            "total_s": steps_s + validation_s + checkpoint_s + other_s,
            "start_s": 0.0,
            "steps_s": steps_s,
            "validation_s": validation_s,
            "checkpoint_s": checkpoint_s,
            "epoch_end_s": 0.0,
            "logging_s": 0.0,
            "callbacks": {},
            "end_s": 0.0,
            "other_s": other_s,
        }

    @cached_property
    def once_s(self) -> float:
        """Seconds that a run loses once, whatever its length: start, end, and the excess of the first steps."""
        wall, throughput = self.wall, self.record.throughput
        if wall is None:
            return 0.0
        warmup = throughput["warmup_steps"] if throughput else 0
        first_s = float(self.all_ms[:warmup].sum()) / 1e3
        return wall["start_s"] + wall["end_s"] + max(0.0, first_s - warmup * (self.step_ms or 0.0) / 1e3)

    @cached_property
    def steps_frac(self) -> float | None:
        """Share of the wall time of training spent in steps; None if unknown. A loss at start and end below
        `SLOW_START_S` is left out, since no setting changes it."""
        wall = self.wall
        if wall is None:
            return None
        once_s = self.once_s
        late_s = max(0.0, once_s - wall["start_s"] - wall["end_s"])
        of_s = wall["total_s"] - (once_s if once_s < SLOW_START_S else 0.0)
        in_steps_s = wall["steps_s"] - late_s + hooks_within_steps_s(wall)
        return max(0.0, in_steps_s / of_s) if of_s > 0 else None

    @property
    def at_ceiling_frac(self) -> float | None:
        """Share of the wall time of training that the same steps would take at the ceiling's rate; None if unknown."""
        frac, factor = self.steps_frac, self.ceiling_factor
        return None if frac is None or factor is None else min(1.0, frac / max(1.0, factor))

    @property
    def time(self) -> TimeEntry | None:
        """Shares and length of a step, from the record."""
        return self.record.time

    @cached_property
    def phase_fracs(self) -> Mapping[str, float]:
        """Share of each phase of compute in a step; empty if unknown."""
        return phase_shares(self.record.time)

    @property
    def wait_frac(self) -> float:
        """Share of training's time spent waiting for batches; 0 if not measured."""
        return self.record.time["wait_frac"] if self.record.time else 0.0

    @property
    def copy_frac(self) -> float:
        """Share of training's time in copies that no computation hid; 0 on a CPU."""
        return (self.record.time["copy_frac"] or 0.0) if self.record.time else 0.0

    @cached_property
    def step_ms(self) -> float | None:
        """Mean milliseconds of a whole step."""
        if len(self.wait_ms):
            return float(np.mean(self.wait_ms + self.rest_ms))
        throughput = self.record.throughput
        if throughput and throughput["samples_per_s"] > 0 and self.record.steps:
            return 1e3 * self.record.samples / self.record.steps / throughput["samples_per_s"]
        return None

    def period_s(self, lag: int) -> float | None:
        """Returns the mean seconds from a step to the one ``lag`` steps later, gaps included."""
        ended_at_s = self.column("time_s")
        if len(ended_at_s) <= lag or not ended_at_s[-1] > ended_at_s[0]:
            return None if self.step_ms is None else lag * self.step_ms / 1e3
        return float(np.mean(ended_at_s[lag:] - ended_at_s[:-lag]))

    @cached_property
    def ceiling_factor(self) -> float | None:
        """The ceiling over the rate: the speed-up if data cost nothing."""
        throughput, ceiling = self.record.throughput, self.record.ceiling
        if not (throughput and ceiling) or throughput["samples_per_s"] <= 0:
            return None
        return ceiling["samples_per_s"] / throughput["samples_per_s"]

    @cached_property
    def build_ms(self) -> float | None:
        """Mean milliseconds to build one batch, in any process."""
        return self.record.loading.get("build_ms_mean")

    @cached_property
    def build_cpu_ms(self) -> float | None:
        """CPU milliseconds to build one batch."""
        share = self.record.loading.get("cpu_frac")
        return None if share is None or self.build_ms is None else share * self.build_ms

    # Telemetry

    def curve(self, name: str, gpu: int = HOST) -> Series:
        """Returns the readings of a figure during training, without missing ones."""
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
        taken = self.curves.get(HOST, {}).get("others_cpu_pct", _EMPTY) / 100
        cores = self.cores
        if cores is None:
            return taken
        other_cores = max(0.0, (self.record.machine.get("host_cores") or cores) - cores)
        return np.clip(taken - other_cores - self._cores_of_other_ranks, 0.0, cores)

    @property
    def _cores_of_other_ranks(self) -> float:
        """Cores of the other ranks on rank 0's machine, unless it has started them and counts them as its own."""
        if self.record.launch is None:
            return 0.0
        here = (one for one in self.record.ranks if one["node"] == 0 and one["rank"] > 0)
        return sum(one.get("cores") or 0.0 for one in here)

    @property
    def mean_others_cores(self) -> float | None:
        """Mean of `others_cores`; None without readings."""
        known = self.others_cores[np.isfinite(self.others_cores)]
        return float(known.mean()) if len(known) else None

    @property
    def gpus(self) -> list[int]:
        """Numbers of the watched GPUs."""
        return sorted(gpu for gpu in self.curves if not is_host(gpu))

    @cached_property
    def util_pct(self) -> float | None:
        """Mean utilisation during training of the least busy GPU; None without NVML."""
        found = [self.mean("util_pct", gpu) for gpu in self.gpus]
        return min((one for one in found if one is not None), default=None)

    @cached_property
    def swings_of_steps(self) -> list[StepSwing]:
        """Step times that repeat, at lags that settings imply; the strongest first."""
        return swings_in_steps(self.wait_ms, self.rest_ms, self.lags, self.gap_ms)

    @cached_property
    def lags(self) -> Mapping[str, int]:
        """Steps between periodic events, by setting."""
        return lags_of(self.record, self.column("epoch"))

    @cached_property
    def swings_of_gpus(self) -> Mapping[int, Swing]:
        """Utilisation that rises and falls with a period, by GPU.

        Readings do not show the swing of steps that is shorter than a few of them. They seem to swing with a longer
        period then, which is no GPU's.
        """
        found = {}
        of_steps = [period_s for swing in self.swings_of_steps if (period_s := self.period_s(swing.lag)) is not None]
        for gpu in self.gpus:
            curve = self.curves[gpu]
            at_s, util_pct = curve.get("time_s", _EMPTY), curve.get("util_pct", _EMPTY)
            swing = swing_in_time(at_s, util_pct) if len(at_s) == len(util_pct) else None
            shortest_s = _READINGS * float(np.median(np.diff(at_s))) if len(at_s) > 1 else 0.0
            if swing is not None and all(period_s >= shortest_s for period_s in of_steps):
                found[gpu] = swing
        return found


def _took_ms(steps: Mapping[str, Series], names: Sequence[str]) -> Series:
    """Returns the sum of the columns that the table has; a missing figure counts as 0."""
    columns = [np.nan_to_num(steps[name]) for name in names if len(steps.get(name, ()))]
    return np.asarray(np.sum(columns or [np.zeros(len(steps.get("wait_ms", ())))], axis=0))


def _with_figures(record: RunRecord, table: Mapping[str, Series]) -> RunRecord:
    """Returns the record with rate and shares of the latest steps of the table, if the table has any."""
    number = len(table["step"])
    names = ("samples", "wait_ms", "compute_ms", "host_ms", "ready")
    if any(len(table[name]) != number for name in names):
        return record
    latest = range(max(0, number - _LATEST), number)
    summary = summarise([_row(table, index, is_warmup=index < _WARMUP) for index in latest])
    if summary is None:
        return record
    unit = record.config.get("workload", {}).get("sample_unit", "samples")
    return replace(
        record,
        throughput=summary.throughput(unit),
        time=summary.time(),
        readiness_frac=summary.readiness_frac,
        loading={**record.loading, **summary.loading()},
        steps=max(record.steps, number, int(np.nanmax(table["step"], initial=0.0))),
        epochs=max(record.epochs or 0.0, float(np.nanmax(table["epoch"], initial=0.0))),
        samples=max(record.samples, int(np.nansum(table["samples"]))),
        duration_s=max(record.duration_s, float(np.nanmax(table["time_s"], initial=0.0))),
    )


def _with_watched(record: RunRecord, watched: Mapping[int, Mapping[str, Series]]) -> RunRecord:
    """Returns the record with figures of GPUs and host during training, where it lacks them."""
    found: dict[int, dict[str, Any]] = {}
    for gpu, curve in watched.items():
        in_training = np.isin(curve["phase"], [PHASES.index(phase) for phase in TRAINING])
        for name in sorted(curve.keys() - {"time_s", "step", "phase"}):
            values = curve[name][in_training & np.isfinite(curve[name])]
            if len(values):
                p5, p50, p95 = (float(level) for level in np.percentile(values, (5, 50, 95)))
                mean, most = float(values.mean()), float(values.max())
                figures = {"mean": mean, "p5": p5, "p50": p50, "p95": p95, "max": most, "n": len(values)}
                found.setdefault(gpu, {})[name] = figures
    host = found.pop(HOST, {})
    if not record.host and {"cpu_pct", "rss_gib"} <= host.keys():
        record = replace(record, host={"cpu_pct": host["cpu_pct"]["mean"], "rss_gib": host["rss_gib"]["mean"]})
    gpus = {str(named(gpu)): figures for gpu, figures in found.items() if not is_host(gpu)}
    return replace(record, gpus=record.gpus or gpus)


def _row(table: Mapping[str, Series], index: int, *, is_warmup: bool) -> StepRow:
    cells: dict[str, Any] = {
        name: float(column[index])
        for name, column in table.items()
        if len(column) > index and np.isfinite(column[index])
    }
    counts: dict[str, Any] = {name: int(cells.get(name, 0)) for name in ("step", "epoch", "samples", "micro_batch")}
    times: dict[str, Any] = {name: cells.get(name, 0.0) for name in ("time_s", "wait_ms", "compute_ms", "host_ms")}
    names = ("copy_ms", "build_ms", "build_cpu_ms", "launch_ms", *PHASE_COLUMNS)
    optional: dict[str, Any] = {name: cells.get(name) for name in names}
    asked_wait_ms = 0.0 if cells.get("ready") else float("inf")
    num_micro = int(cells.get("num_micro") or 1)
    return StepRow(**counts, **times, **optional, num_micro=num_micro, asked_wait_ms=asked_wait_ms, warmup=is_warmup)
