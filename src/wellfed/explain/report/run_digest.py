"""Puts a run into one row of a table: what became of it, its rate, its share of the ceiling, a finding, a metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wellfed.record import RunRecord
from wellfed.units import show_count, show_percent, show_text

WIDE = ("run", "workload", "status", "age", "rate", "ceiling", "steps", "first finding", "metric")
NARROW = 5
"""Columns shown on a narrow terminal; the others stand in a line below."""


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
    of_ceiling_frac: float | None = None
    finding: str | None = None
    """The id of the first."""
    metric: str | None = None
    """The one that picks the best checkpoint, else the first of the validation, else of the test."""
    value: float | None = None
    problem: str | None = None
    """Problem of the record, or the error that ended the run."""


def digest(folder: Path, found: RunRecord | Exception) -> RunDigest:
    """Returns the row of a run folder and its record, or of the error in reading it."""
    run, workload = folder.name, folder.parent.parent.name
    if isinstance(found, Exception):
        problem = (found.strerror or str(found)) if isinstance(found, OSError) else str(found)
        return RunDigest(run, str(folder), workload, "damaged", problem=problem)
    throughput, ceiling = found.throughput, found.ceiling
    rate, top = (figure["samples_per_s"] if figure else None for figure in (throughput, ceiling))
    metric = _metric_of(found.metrics, found.config)
    return RunDigest(
        run=run,
        folder=str(folder),
        workload=found.workload or workload,
        status=found.status,
        started_at=found.started_at or None,
        duration_s=found.duration_s,
        steps=found.steps,
        samples_per_s=rate,
        sample_unit=throughput["sample_unit"] if throughput else None,
        of_ceiling_frac=rate / top if rate and top else None,
        finding=found.findings[0]["id"] if found.findings else None,
        metric=metric,
        value=found.metrics[metric] if metric else None,
        problem=found.error["message"] if found.error else None,
    )


def _metric_of(metrics: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    trainer = config.get("trainer")
    best = trainer.get("best_metric") if isinstance(trainer, Mapping) else None
    if f"val/{best}" in metrics:
        return f"val/{best}"
    return next((name for split in ("val/", "test/") for name in metrics if name.startswith(split)), None)


def row(one: RunDigest, now: datetime) -> list[str]:
    """Returns the cells of a run under `WIDE`, and its problem, each of one line; empty: unknown."""
    rate = "" if one.samples_per_s is None else f"{show_count(one.samples_per_s)} {one.sample_unit}/s"
    of_ceiling = "" if one.of_ceiling_frac is None else show_percent(min(one.of_ceiling_frac, 1.0))
    value = "not finite" if one.value is None else f"{one.value:.4g}"
    metric = "" if one.metric is None else f"{one.metric} {value}"
    steps = "" if one.steps is None else str(one.steps)
    cells = [one.run, one.workload, one.status, _age(one.started_at, now), rate, of_ceiling, steps, one.finding or ""]
    return [" ".join(show_text(cell).split()) for cell in (*cells, metric, one.problem or "")]


def _age(started_at: str | None, now: datetime) -> str:
    try:
        then = datetime.fromisoformat(started_at or "")
    except ValueError:
        return ""
    age_s = (now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()
    units = (("d", 172_800, 86_400), ("h", 7_200, 3_600), ("min", 120, 60))
    unit, length_s = next(((unit, length_s) for unit, least_s, length_s in units if age_s >= least_s), ("s", 1))
    return f"{max(0, age_s) / length_s:.0f} {unit}"


def lines(rows: list[list[str]], width: int | None) -> list[str]:
    """Returns a table of `row`s; cells that exceed the width stand in a line below their run.

    Args:
        width: characters of a line; None = unlimited.
    """
    table = [list(WIDE), *(cells[: len(WIDE)] for cells in rows)]
    widths = [max(len(cells[place]) for cells in table) for place in range(len(WIDE))]
    is_wide = width is None or sum(widths) + 2 * (len(WIDE) - 1) <= width
    shown = len(WIDE) if is_wide else NARROW
    found = [_line(table[0][:shown], widths)]
    for cells in rows:
        found.append(_line(cells[:shown], widths))
        ceiling, steps, finding, metric, problem = cells[NARROW:]
        below = [ceiling and f"{ceiling} of the ceiling", steps and f"{steps} steps", finding, metric]
        below = [problem] if is_wide else [*below, problem]
        if any(below):
            found.append(f"  {', '.join(filter(None, below))}")
    return found


def _line(cells: list[str], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip()
