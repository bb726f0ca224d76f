"""Puts a run into one row of a table: its outcome, verdict, rate, share of the ceiling, metric and typed overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from wellfed.explain.diagnosis.ceiling_check import contradiction, of_ceiling
from wellfed.explain.diagnosis.finding import colour_of, word_of
from wellfed.explain.report.figures import figures_of
from wellfed.explain.report.run_lines import show_figure, simulated_line
from wellfed.explain.report.text_table import TextTable
from wellfed.record.entries import RunRecord

_HEADS = ("run", "workload", "status", "started", "verdict", "rate", "ceiling", "metric", "typed", "problem")
_STATUS_COLOURS = dict.fromkeys(("failed", "oom", "killed", "timeout", "damaged"), "red") | {"interrupted": "yellow"}


class RunDigest(NamedTuple):
    """A run in short."""

    data: dict[str, Any]
    """For programs; unknown values are None."""
    cells: Sequence[str | Text]
    """For people, a cell for each head."""


def digest(folder: Path, found: RunRecord | Exception) -> RunDigest:
    """Returns the row of a run folder and its record, or of the error in reading it: its status is ``damaged``."""
    record, problem = RunRecord(folder.name, status="damaged"), str(found)  # type: ignore[arg-type]
    if isinstance(found, RunRecord):
        record, problem = found, found.error["message"] if found.error else ""
    elif isinstance(found, OSError):
        problem = found.strerror or problem
    figures, metric, workload = figures_of(record), _metric_of(record), record.workload or folder.parent.parent.name
    first = record.findings[0] if record.findings else None
    is_simulated = bool(simulated_line(record)) and not record.is_on_cpu
    is_doubtful = contradiction(record) is not None
    data = {
        "run": folder.name,
        "folder": str(folder),
        "workload": workload,
        "status": record.status,
        "started_at": record.started_at or None,
        "duration_s": record.duration_s or None,
        "steps": record.steps or None,
        "samples_per_s": record.throughput["samples_per_s"] if record.throughput else None,
        "sample_unit": record.throughput["sample_unit"] if record.throughput else None,
        "is_simulated": is_simulated,
        "of_ceiling_frac": of_ceiling(record),
        "is_ceiling_doubtful": is_doubtful,
        "finding": first["id"] if first else None,
        "severity": first["severity"] if first else None,
        "verdict": word_of(first) if first else None,
        "metric": metric,
        "value": record.metrics[metric] if metric else None,
        "overrides": list(record.overrides),
        "problem": problem or None,
    }
    cells = (
        *(folder.name, workload, Text(record.status, _STATUS_COLOURS.get(record.status, ""))),
        record.started_at[:16].replace("T", " "),
        Text(word_of(first), colour_of(first["id"], first["severity"])) if first else "",
        f"{figures['rate'].text}{' simulated' if is_simulated else ''}" if "rate" in figures else "",
        f"{figures['of_ceiling'].text}{' (doubtful)' if is_doubtful else ''}" if "of_ceiling" in figures else "",
        f"{metric} {show_figure(record.metrics[metric], 4)}" if metric else "",
        " ".join(text for text in record.overrides if not text.startswith("workload=")),
        problem,
    )
    return RunDigest(data, cells)


def _metric_of(record: RunRecord) -> str | None:
    """Returns the metric that picks the best checkpoint, else the first of the validation, else of the test."""
    best = (record.config.get("trainer") or {}).get("best_metric")
    bare = str(best).removeprefix("val/").removeprefix("val_")  # a LightningModule's may have the split's name
    names = [f"val/{bare}", *(name for split in ("val/", "test/") for name in record.metrics if name.startswith(split))]
    return next((name for name in names if name in record.metrics), None)


def runs_table(runs: Sequence[RunDigest]) -> TextTable:
    """Returns a table with a row for each run; without the last column where no run had a problem."""
    number = len(_HEADS) - (not any(one.data["problem"] for one in runs))
    table = TextTable(*_HEADS[:number])
    for one in runs:
        table.add_row(*one.cells[:number])
    return table
