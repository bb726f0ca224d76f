"""Puts a run into one row of a table: its outcome, verdict, rate, share of the ceiling, metric and typed overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.text import Text

from wellfed.explain.diagnosis.ceiling_check import contradiction, of_ceiling
from wellfed.explain.diagnosis.finding import colour_of, word_of
from wellfed.explain.report.text_table import TextTable
from wellfed.record.entries import RunRecord
from wellfed.units import show_count, show_percent

_HEADS = ("run", "workload", "status", "age", "verdict", "rate", "ceiling", "metric")
_STATUS_COLOURS = dict.fromkeys(("failed", "oom", "killed", "timeout", "damaged"), "red") | {"interrupted": "yellow"}


@dataclass(frozen=True)
class RunDigest:
    """Run as plain data for programs; unknown values are None."""

    run: str
    folder: str
    workload: str
    status: str
    """``damaged``: the record can't be read."""
    started_at: str | None = None
    duration_s: float | None = None
    steps: int | None = None
    samples_per_s: float | None = None
    sample_unit: str | None = None
    is_simulated: bool = False
    """Whether a simulated GPU made the rate."""
    of_ceiling_frac: float | None = None
    is_ceiling_doubtful: bool = False
    """Whether the time spent on data contradicts the ceiling."""
    finding: str | None = None
    severity: str | None = None
    verdict: str | None = None
    """Word of the verdict, as on the page."""
    metric: str | None = None
    """Metric that picks the best checkpoint, else the first of the validation, else of the test."""
    value: float | None = None
    overrides: tuple[str, ...] = ()
    """Overrides that were typed, with secrets masked."""
    problem: str | None = None
    """Problem of the record, or the error that ended the run."""


def digest(folder: Path, found: RunRecord | Exception) -> RunDigest:
    """Returns the row of a run folder and its record, or of the error in reading it."""
    run, workload = folder.name, folder.parent.parent.name
    if isinstance(found, Exception):
        problem = (found.strerror or str(found)) if isinstance(found, OSError) else str(found)
        return RunDigest(run, str(folder), workload, "damaged", problem=problem)
    throughput, metric = found.throughput, _metric_of(found)
    first = found.findings[0] if found.findings else None
    return RunDigest(
        run=run,
        folder=str(folder),
        workload=found.workload or workload,
        status=found.status,
        started_at=found.started_at or None,
        duration_s=found.duration_s,
        steps=found.steps,
        samples_per_s=throughput["samples_per_s"] if throughput else None,
        sample_unit=throughput["sample_unit"] if throughput else None,
        is_simulated=not found.is_on_cpu and any(gpu.get("is_simulated") for gpu in found.machine.get("gpus", ())),
        of_ceiling_frac=of_ceiling(found),
        is_ceiling_doubtful=contradiction(found) is not None,
        finding=first["id"] if first else None,
        severity=first["severity"] if first else None,
        verdict=word_of(first) if first else None,
        metric=metric,
        value=found.metrics[metric] if metric else None,
        overrides=tuple(found.overrides),
        problem=found.error["message"] if found.error else None,
    )


def _metric_of(record: RunRecord) -> str | None:
    best = (record.config.get("trainer") or {}).get("best_metric")
    bare = str(best).removeprefix("val/").removeprefix("val_")  # a LightningModule's may have the split's name
    names = [f"val/{bare}", *(name for split in ("val/", "test/") for name in record.metrics if name.startswith(split))]
    return next((name for name in names if name in record.metrics), None)


def runs_table(runs: Sequence[RunDigest], now: datetime, width: int | None) -> TextTable:
    """Returns a table with a row for each run. Typed overrides have a column, or on a terminal lines of its width."""
    table = TextTable(*_HEADS, *([] if width else ["typed"]))
    for one in runs:
        typed = " ".join(text for text in one.overrides if not text.startswith("workload="))
        line = f"typed: {typed}" if width and typed else ""
        table.add_row(*_cells(one, now), *([] if width else [typed]), below=[line, one.problem or ""])
    return table


def _cells(one: RunDigest, now: datetime) -> list[str | Text]:
    rate = "" if one.samples_per_s is None else f"{show_count(one.samples_per_s)} {one.sample_unit}/s"
    rate += " simulated" if rate and one.is_simulated else ""
    of_ceiling = "" if one.of_ceiling_frac is None else show_percent(min(one.of_ceiling_frac, 1.0))
    of_ceiling += " (doubtful)" if of_ceiling and one.is_ceiling_doubtful else ""
    value = "not finite" if one.value is None else f"{one.value:.4g}"
    metric = "" if one.metric is None else f"{one.metric} {value}"
    verdict = Text(one.verdict or "", colour_of(one.finding or "", one.severity or ""))
    status = Text(one.status, _STATUS_COLOURS.get(one.status, ""))
    return [one.run, one.workload, status, _age(one.started_at, now), verdict, rate, of_ceiling, metric]


def _age(started_at: str | None, now: datetime) -> str:
    if not started_at:
        return ""
    then = datetime.fromisoformat(started_at)
    age_s = (now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()
    units = (("d", 172_800, 86_400), ("h", 7_200, 3_600), ("min", 120, 60))
    unit, length_s = next(((unit, length_s) for unit, least_s, length_s in units if age_s >= least_s), ("s", 1))
    return f"{max(0, age_s) / length_s:.0f} {unit}"
