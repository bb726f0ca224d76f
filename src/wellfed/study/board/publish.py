"""Copies a sweep into wandb: a run for each trial, all in one group, and one with the leaderboard as a table.

It reads the files when all is measured, so that it disturbs no figure.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from wellfed.config.schema import LoggerConfig
from wellfed.observe.loggers import wandb_sink
from wellfed.observe.loggers.wandb_sink import WandbSink
from wellfed.observe.telemetry.metrics import TIME_AXIS, prefix
from wellfed.record import entries
from wellfed.record.entries import FILE_NAME
from wellfed.record.files import write_atomically
from wellfed.study.board.files import CSV
from wellfed.study.rows import Row
from wellfed.study.study_files import SweepFile

_NOT_FIGURES = ("time_s", "step", "phase", "gpu")
_SUMMARY = {
    "status": "status",
    "throughput/samples_per_s": "samples_per_s",
    "throughput/readiness_frac": "readiness_frac",
    "ceiling/samples_per_s": "ceiling_samples_per_s",
    "memory/peak_gib": "peak_memory_gib",
    "gpu/util_pct": "util_pct",
    "gpu/energy_per_sample_j": "energy_per_sample_j",
    "seconds": "seconds",
}
"""Name in wandb -> field of a row."""


def unpublished(folder: Path, rows: Sequence[Row]) -> list[tuple[Row, dict[str, Any]]]:
    """Returns the rows whose trials are not in wandb yet, with their records; trials without one are left out."""
    found = []
    for row in rows:
        with suppress(OSError, ValueError):
            if row.folder and not (recorded := entries.read(folder / row.folder)).get("wandb"):
                found.append((row, recorded))
    return found


def publish(folder: Path, file: SweepFile, trials: Sequence[tuple[Row, dict[str, Any]]], logger: LoggerConfig) -> None:
    """Copies ``leaderboard.csv``, then the trials that `unpublished` returns.

    Raises:
        RuntimeError: wandb can't be started.
        OSError: there is no leaderboard.
    """
    open_run = partial(
        wandb_sink.open_run,
        mode=wandb_sink.decide_mode(logger.mode.value),
        project=logger.project,
        entity=logger.entity,
        group=logger.group or f"{file.workload}/{file.name}",
        run_id=None,
    )
    with (folder / CSV).open(encoding="utf-8", newline="") as stream:
        columns, *table = csv.reader(stream)
    sink = open_run(folder, name=f"{file.name} leaderboard", config={"sweep": file.to_dict()})
    sink.table("leaderboard", columns, table)
    sink.finish({"points": len(table)}, 0)
    for row, recorded in trials:
        _copy(
            folder / row.folder, row, recorded, open_run(folder / row.folder, name=row.point, config=recorded["config"])
        )


def _copy(folder: Path, row: Row, recorded: dict[str, Any], sink: WandbSink) -> None:
    """Copies telemetry and figures of a trial, and notes it in the trial's record."""
    for figures in _telemetry(folder / "telemetry.csv"):
        sink.log(figures)
    known = {name: getattr(row, field) for name, field in _SUMMARY.items()}
    sink.finish({name: value for name, value in known.items() if value is not None}, recorded.get("exit_code") or 0)
    copied = {"id": sink.id, "mode": sink.mode, "path": str(sink.folder), "parts": [str(sink.folder)]}
    write_atomically(folder / FILE_NAME, json.dumps({**recorded, "wandb": copied}, indent=1) + "\n")


def _telemetry(path: Path) -> Iterator[dict[str, float]]:
    """Yields the figures of each reading, as a run would have logged them."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, csv.Error):
        return
    for time_s, samples in groupby(rows, key=lambda row: row.get("time_s")):
        with suppress(KeyError, TypeError, ValueError):  # a damaged row
            figures = {
                f"{prefix(int(sample['gpu']))}/{name}": float(value)
                for sample in samples
                for name, value in sample.items()
                if name not in _NOT_FIGURES and value
            }
            yield {TIME_AXIS: float(time_s or ""), **figures}
