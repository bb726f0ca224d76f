"""Gathers all recorded facts of a run in one object that the rules of the diagnosis read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from wellfed.explain.diagnosis import run_tables
from wellfed.explain.diagnosis.curves.swing import RunSwings
from wellfed.explain.diagnosis.run_tables import PHASES, Series, TrainingTelemetry
from wellfed.explain.diagnosis.step_times import StepTimes, WallTime, is_after_resume
from wellfed.observe.telemetry.series import HOST
from wellfed.observe.timing.readiness import StepTable, summarise
from wellfed.record.entries import RankEntry, RunRecord

_EMPTY = np.empty(0)


def host_of(rank: RankEntry) -> str | int:
    """Returns the machine of a rank. Several nodes may be one machine, so its name counts where it is known."""
    return rank.get("host") or rank["node"]


@dataclass(frozen=True)
class Evidence:
    """Record and tables of a run. A figure that was not measured is None, an empty column or nan, never 0."""

    record: RunRecord
    all_steps: Mapping[str, Series] = field(default_factory=dict)
    """Columns of steps.csv, warm-up included; all equally long, or empty."""
    curves: Mapping[int, Mapping[str, Series]] = field(default_factory=dict)
    """Columns of telemetry.csv during training since the last resume, with ``time_s`` and ``step``, by GPU and
    ``HOST``."""
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
        table = run_tables.columns(folder / "steps.csv")
        since = [event["kind"] for event in record.events if event["kind"] in ("resume", "checkpoint")]
        # The figures are those of the processes before; the table has later steps.
        is_old = record.status in ("running", "killed") and since[-1:] == ["resume"]
        if len(table.get("step", ())) and (is_old or record.status == "running"):
            record = replace(record, throughput=None, time=None, readiness_frac=None, gpus={}, ceiling=None)
        if is_old:
            record = replace(record, wall=None)
        in_training, metrics = PHASES.index("train"), run_tables.metric_curves(folder)
        watched = run_tables.curves(folder)
        return cls(
            record if record.throughput else _with_figures(record, table, watched),
            table,
            {
                gpu: {name: column[is_read] for name, column in curve.items()}
                for gpu, curve in watched.items()
                if np.any(is_read := (curve["phase"] == in_training) & is_after_resume(record, curve, "time_s"))
            },
            metrics.get(("train", "loss"), (_EMPTY, _EMPTY)),
            watched,
            metrics,
            run_tables.passes_ended(folder),
        )

    @classmethod
    def read(cls, folder: Path) -> Evidence:
        """Reads a run folder. Raises as `wellfed.record.entries.read` does."""
        return cls.of(RunRecord.read(folder), folder)

    @cached_property
    def steps(self) -> StepTimes:
        """Times of the steps."""
        return StepTimes(self.record, self.all_steps)

    @cached_property
    def wall(self) -> WallTime:
        """Wall time of training."""
        return WallTime(self.record, self.steps)

    @cached_property
    def telemetry(self) -> TrainingTelemetry:
        """Readings of GPUs and host during training. A run on the CPU has no GPUs: it watched those of others."""
        on_cpu = self.record.is_on_cpu
        curves = {gpu: curve for gpu, curve in self.curves.items() if gpu == HOST or not on_cpu}
        return TrainingTelemetry(curves, self.cores, self.record.machine.get("host_cores"), self.num_ranks == 1)

    @cached_property
    def swings(self) -> RunSwings:
        """Swings of steps and GPUs."""
        return RunSwings(self.record, self.steps, self.telemetry)

    @cached_property
    def facts(self) -> dict[Any, Any]:
        """Results of the functions that `once` has made, by function."""
        return {}

    @cached_property
    def first_metrics(self) -> Mapping[str, float]:
        """First value of each metric that has several, as ``split/name``."""
        return {"/".join(key): float(values[0]) for key, (_, values) in self.metrics.items() if len(values) > 1}

    def value(self, knob: str) -> Any:
        """Returns a knob as planned, else as configured; None if neither has it."""
        if knob in self.record.plan:
            return self.record.plan[knob]["value"]
        found: Any = self.record.config
        for name in knob.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def num_events(self, kind: str) -> int:
        """Returns the number of events of a kind, those that the record leaves out included."""
        return sum(1 + event.get("left_out", 0) for event in self.record.events if event["kind"] == kind)

    @property
    def num_workers(self) -> int:
        """Threads or processes that build batches; 0 = the training process does."""
        return int(self.value("loader.num_workers") or 0)

    @property
    def num_devices(self) -> int:
        """Planned ranks of each node."""
        return int(self.value("trainer.devices") or 1)

    @property
    def num_ranks(self) -> int:
        """Ranks of the run: as planned, or as many as have reported."""
        planned = self.num_devices * int(self.value("trainer.num_nodes") or 1)
        return max(planned, len(self.record.ranks))

    @property
    def cores(self) -> float | None:
        """CPUs that this run may use; None if not measured."""
        return self.record.machine.get("cpu_quota_cores")

    @property
    def on_gpu(self) -> bool:
        """Whether the run trained on a GPU."""
        return self.record.time is not None and self.record.time["copy_frac"] is not None

    @property
    def wait_frac(self) -> float:
        """Share of training's time spent waiting for batches; 0 if not measured."""
        return self.record.time["wait_frac"] if self.record.time else 0.0

    @property
    def copy_frac(self) -> float:
        """Share of training's time in copies that no computation hid; 0 on a CPU."""
        return (self.record.time["copy_frac"] or 0.0) if self.record.time else 0.0

    @cached_property
    def ceiling_factor(self) -> float | None:
        """The ceiling over the rate: the speed-up if data cost nothing."""
        throughput, ceiling = self.record.throughput, self.record.ceiling
        if not (throughput and ceiling) or throughput["samples_per_s"] <= 0:
            return None
        return ceiling["samples_per_s"] / throughput["samples_per_s"]


_Fact = TypeVar("_Fact")


def once(compute: Callable[[Evidence], _Fact]) -> Callable[[Evidence], _Fact]:
    """Makes a function keep its result with the `Evidence`, so that each fact is computed once."""

    @wraps(compute)
    def fact(evidence: Evidence) -> _Fact:
        if compute not in evidence.facts:
            evidence.facts[compute] = compute(evidence)
        known: _Fact = evidence.facts[compute]
        return known

    return fact


def _with_figures(
    record: RunRecord, table: Mapping[str, Series], watched: Mapping[int, Mapping[str, Series]]
) -> RunRecord:
    """Returns the record with the figures of the latest steps, and those of GPUs and host that it lacks."""
    found = run_tables.figures(watched)
    host = found.pop(HOST, {})
    if not record.host and {"cpu_pct", "rss_gib"} <= host.keys():
        record = replace(record, host={"cpu_pct": host["cpu_pct"]["mean"], "rss_gib": host["rss_gib"]["mean"]})
    record = replace(record, gpus=record.gpus or {str(gpu): figures for gpu, figures in found.items()})
    needed = ("step", "time_s", "epoch", "samples", "wait_ms", "compute_ms", "host_ms", "ready")
    if not len(table.get("step", ())) or any(name not in table for name in needed):
        return record
    last = {name: float(np.nanmax(table[name], initial=0.0)) for name in ("step", "time_s", "epoch")}
    record = replace(
        record,
        steps=max(record.steps, int(last["step"])),
        epochs=None if record.epochs is None else max(record.epochs, last["epoch"]),
        samples=max(record.samples, int(np.nansum(table["samples"]))),
        duration_s=max(record.duration_s, last["time_s"]),
    )
    latest = is_after_resume(record, table)
    summary = summarise(StepTable.of_columns({name: column[latest] for name, column in table.items() if len(column)}))
    if summary is None:
        return record
    return replace(
        record,
        throughput=summary.throughput(record.config.get("workload", {}).get("sample_unit", "samples")),
        time=summary.time,
        readiness_frac=summary.readiness_frac,
        loading={**record.loading, **summary.loading},
    )
