"""Holds what tune knows of one configuration: what was typed for it, and what its trial measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from wellfed.record import FindingEntry, LoadingEntry, PlanEntry, RunRecord, Status, TimeEntry
from wellfed.study.objective import Objective
from wellfed.study.row import Row

Knobs = tuple[tuple[str, Any], ...]
"""Dotted knobs with their values, sorted."""
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "timeout_s", "worker_threads")
"""Knobs of the loader that do nothing without workers."""


@dataclass(frozen=True)
class Change:
    """A configuration to be tried."""

    overrides: tuple[str, ...]
    """All that is typed behind the start's own words; none for the start itself."""
    because: str
    """What led to it, in one line."""
    turned: tuple[str, ...] = ()
    """Of these, what differs from the best configuration so far."""
    finding: str | None = None
    """Id of the finding that led to it; None: no finding did."""


@dataclass(frozen=True)
class Trial:
    """What came of it; figures are None, and the rest empty, where the trial did not come to them."""

    status: Status
    figure: float | None = None
    """Of the objective."""
    ci95: tuple[float, float] | None = None
    """Of the figure, from the steps of this one trial."""
    seconds: float = 0.0
    """All that the trial took, its start included."""
    error: str | None = None
    """Why it did not end well, or did not run as it was asked to, in one line."""
    findings: Sequence[FindingEntry] = ()
    plan: Mapping[str, PlanEntry] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for, by group, as in run.json."""
    time: TimeEntry | None = None
    loading: LoadingEntry = field(default_factory=LoadingEntry)
    readiness_frac: float | None = None
    ceiling_factor: float | None = None
    """Its ceiling over its rate."""
    beside_seconds: float = 0.0
    """That composing, preparing and planning took before it."""

    @classmethod
    def of(cls, row: Row, record: RunRecord | None, objective: Objective) -> Self:
        """From a row of a ledger, and what the trial has recorded."""
        figure = objective(row) if row.status == "ok" else None
        told = None if row.error is None else " ".join(str(row.error.get("message") or "").split())
        if row.status == "ok" and figure is None:
            told = objective.missing
        if record is None:
            return cls(row.status, figure, seconds=row.seconds, error=told)
        ceiling, rate, plan = row.ceiling_samples_per_s, row.samples_per_s, record.plan
        failed = next((event for event in record.events if event["kind"] == "compile_failed"), None)
        if failed is not None and "gpu.compile" in plan:  # its steps ran as they are
            plan = {**plan, "gpu.compile": {**plan["gpu.compile"], "value": "none"}}
            told = told or f"gpu.compile failed ({failed.get('message')})"
        return cls(
            row.status,
            figure,
            row.ci95 if objective.is_interval_known else None,
            row.seconds,
            told,
            tuple(record.findings),
            plan,
            record.config,
            record.time,
            record.loading,
            row.readiness_frac,
            ceiling / rate if ceiling and rate else None,
        )

    @property
    def is_measured(self) -> bool:
        """It ended well and has a figure."""
        return self.status == "ok" and self.figure is not None and math.isfinite(self.figure) and self.figure > 0

    def value(self, knob: str) -> Any:
        """A planned value; None where the plan says nothing of it."""
        entry = self.plan.get(knob)
        return None if entry is None else entry["value"]

    def asked(self, knob: str) -> Any:
        """What was configured; None = left to the plan, or not known."""
        found: Any = self.config
        for name in knob.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def is_set(self, knob: str) -> bool:
        """Its value was asked for, not planned."""
        entry = self.plan.get(knob)
        return entry is not None and entry["source"] == "set"

    def is_timed(self, knob: str) -> bool:
        """The plan has timed its alternatives."""
        entry = self.plan.get(knob)
        return entry is not None and entry["source"] == "measured"


def same_plan(values: Mapping[str, Any]) -> Knobs:
    """What is left of planned values when those that do nothing are left out: equal for plans that run alike."""
    kept = {knob: value for knob, value in values.items() if knob.partition(".")[0] in ("gpu", "loader", "memory")}
    if str(kept.get("loader.num_workers") or 0) == "0":
        for name in _OF_WORKERS:
            kept.pop(f"loader.{name}", None)
    elif kept.get("loader.backend") == "threads":
        kept.pop("loader.persistent_workers", None)
        kept.pop("loader.worker_threads", None)
    return tuple(sorted((knob, str(value)) for knob, value in kept.items()))


def knob_of(word: str) -> str:
    """The knob or group that an override sets."""
    return word.partition("=")[0].lstrip("+")


def typed_behind(words: Sequence[str], turned: Sequence[str]) -> tuple[str, ...]:
    """The words with further ones behind them; a knob that comes again has the later value alone."""
    knobs = {knob_of(word) for word in turned}
    return (*(word for word in words if knob_of(word) not in knobs), *turned)
