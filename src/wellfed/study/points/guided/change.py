"""Holds one configuration of a tune: its overrides, and what its trial measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from wellfed.record.entries import FindingEntry, LoadingEntry, PlanEntry, RunRecord, Status, TimeEntry
from wellfed.study.objective import SAMPLES_PER_S
from wellfed.study.row import Row

Knobs = tuple[tuple[str, Any], ...]
"""Dotted knobs with their values, sorted."""
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "timeout_s")
"""Knobs of the loader that have no effect without workers."""


@dataclass(frozen=True)
class Change:
    """A configuration to try."""

    overrides: tuple[str, ...]
    """Overrides behind the start's own; none for the start itself."""
    because: str
    """Reason for it, in one line."""
    turned: tuple[str, ...] = ()
    """Overrides that differ from the best configuration so far."""
    finding: str | None = None
    """Id of the finding that led to it; None where no finding did."""


@dataclass(frozen=True)
class TuneTrial:
    """Result of a trial; figures are None, and the rest empty, where the trial did not come to them."""

    status: Status
    figure: float | None = None
    """Samples per second."""
    ci95: tuple[float, float] | None = None
    """95 % interval of the figure, from the steps of this one trial."""
    seconds: float = 0.0
    """Duration of the trial, its start included."""
    error: str | None = None
    """Why it did not end well, or did not run as configured, in one line."""
    findings: Sequence[FindingEntry] = ()
    plan: Mapping[str, PlanEntry] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration by group, as in run.json."""
    time: TimeEntry | None = None
    loading: LoadingEntry = field(default_factory=LoadingEntry)
    ceiling_factor: float | None = None
    """Ceiling over rate."""
    beside_seconds: float = 0.0
    """Duration of composing, preparing and planning before it."""

    @classmethod
    def of(cls, row: Row, record: RunRecord | None) -> Self:
        """Returns the result by a row of a ledger and the trial's record."""
        figure = SAMPLES_PER_S(row) if row.status == "ok" else None
        problem = None if row.error is None else " ".join(str(row.error.get("message") or "").split())
        if row.status == "ok" and figure is None:
            problem = SAMPLES_PER_S.missing
        if record is None:
            return cls(row.status, figure, seconds=row.seconds, error=problem)
        ceiling, rate, plan = row.ceiling_samples_per_s, row.samples_per_s, record.plan
        failed = next((event for event in record.events if event["kind"] == "compile_failed"), None)
        if failed is not None and "gpu.compile" in plan:  # its steps ran as they are
            plan = {**plan, "gpu.compile": {**plan["gpu.compile"], "value": "none"}}
            problem = problem or f"gpu.compile failed ({failed.get('message')})"
        return cls(
            row.status,
            figure,
            row.ci95,
            row.seconds,
            problem,
            tuple(record.findings),
            plan,
            record.config,
            record.time,
            record.loading,
            ceiling / rate if ceiling and rate else None,
        )

    @property
    def is_measured(self) -> bool:
        """Whether it ended well and has a figure."""
        return self.status == "ok" and self.figure is not None and math.isfinite(self.figure) and self.figure > 0

    def value(self, knob: str) -> Any:
        """Returns a planned value; None where the plan has none."""
        entry = self.plan.get(knob)
        return None if entry is None else entry["value"]

    def asked(self, knob: str) -> Any:
        """Returns the configured value; None = left to the plan, or unknown."""
        found: Any = self.config
        for name in knob.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def is_set(self, knob: str) -> bool:
        """Returns whether a value was configured, not planned."""
        entry = self.plan.get(knob)
        return entry is not None and entry["source"] == "set"

    def is_timed(self, knob: str) -> bool:
        """Returns whether the plan timed the alternatives of a knob."""
        entry = self.plan.get(knob)
        return entry is not None and entry["source"] == "measured"


def same_plan(values: Mapping[str, Any]) -> Knobs:
    """Returns the planned values that have an effect: equal for plans that run alike."""
    kept = {knob: value for knob, value in values.items() if knob.partition(".")[0] in ("gpu", "loader", "memory")}
    if str(kept.get("loader.num_workers") or 0) == "0":
        for name in _OF_WORKERS:
            kept.pop(f"loader.{name}", None)
    elif kept.get("loader.backend") == "threads":
        kept.pop("loader.persistent_workers", None)
    return tuple(sorted((knob, str(value)) for knob, value in kept.items()))


def knob_of(setting: str) -> str:
    """Returns the knob or group that an override sets."""
    return setting.partition("=")[0].lstrip("+")


def with_overrides(settings: Sequence[str], turned: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides with further ones behind them; a repeated knob keeps the later value only."""
    knobs = {knob_of(setting) for setting in turned}
    return (*(setting for setting in settings if knob_of(setting) not in knobs), *turned)
