"""Copies a sweep into wandb: a run for each trial, all in one group, and one with the leaderboard as a table.

It reads the files when all is measured, so that it disturbs no figure.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from wellfed import record
from wellfed.config.schema import LoggerConfig
from wellfed.observe.loggers import wandb_sink
from wellfed.observe.loggers.wandb_sink import WandbSink
from wellfed.observe.telemetry.metrics import TIME_AXIS, prefix
from wellfed.study.board.files import CSV
from wellfed.study.row import Row
from wellfed.study.study_files import SweepFile

_DONE = ".published"
"""File with the number of rows that are in wandb."""
_AT_A_TIME = 8
"""Runs that are closed at a time: closing one mostly waits for wandb's service."""
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


def import_wandb() -> None:
    """Imports what `publish` needs, which reports what is wrong with it."""
    with suppress(Exception):
        wandb_sink.list_packages()


def is_published(folder: Path, number_of_rows: int) -> bool:
    """Returns whether nothing was measured since the last copy."""
    try:
        return record.text_of(folder / _DONE) == str(number_of_rows)
    except (OSError, ValueError):
        return False


def publish(folder: Path, file: SweepFile, rows: Sequence[Row], logger: LoggerConfig, *, number_of_rows: int) -> None:
    """Copies the latest ``rows`` of each point that are not in wandb yet, then ``leaderboard.csv``.

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
        beside_others=True,
    )
    new = [row for row in rows if row.folder]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for first in range(0, len(new), _AT_A_TIME):
            opened = [_opened(folder, row, open_run) for row in new[first : first + _AT_A_TIME]]
            list(pool.map(_close, filter(None, opened)))  # raises what one of them has raised
    with (folder / CSV).open(encoding="utf-8", newline="") as stream:
        columns, *table = csv.reader(stream)
    sink = open_run(folder, name=f"{file.name} leaderboard", config={"sweep": file.to_dict()})
    sink.table("leaderboard", columns, table)
    sink.finish({"points": len(table)}, 0)
    record.write_atomically(folder / _DONE, str(number_of_rows))


@dataclass(frozen=True)
class _OpenTrial:
    """Run of a trial in wandb, with its telemetry."""

    folder: Path
    row: Row
    record: dict[str, Any]
    sink: WandbSink


def _opened(study: Path, row: Row, open_run: Callable[..., WandbSink]) -> _OpenTrial | None:
    """Returns the run of a trial; None where the trial left no record, or is in wandb as a whole."""
    trial = study / row.folder
    try:
        made, found = record.RunRecord.read(trial), record.read(trial)
    except (OSError, ValueError):
        return None
    if found.get("wandb"):  # `_close` writes it last
        return None
    sink = open_run(trial, name=row.point, config=made.config)
    for figures in _telemetry(trial / "telemetry.csv"):
        sink.log(figures)
    return _OpenTrial(trial, row, found, sink)


def _close(trial: _OpenTrial) -> None:
    """Closes the run of a trial, and notes it in the trial's record."""
    known = {name: getattr(trial.row, field) for name, field in _SUMMARY.items()}
    summary, sink = {name: value for name, value in known.items() if value is not None}, trial.sink
    sink.finish(summary, trial.record.get("exit_code") or 0)
    copied = {"id": sink.id, "mode": sink.mode, "path": str(sink.folder), "parts": [str(sink.folder)]}
    record.write_atomically(
        trial.folder / record.FILE_NAME, json.dumps({**trial.record, "wandb": copied}, indent=1) + "\n"
    )


def _telemetry(path: Path) -> Iterator[dict[str, float]]:
    """Yields the figures of each reading, as a run would have logged them."""
    try:
        with record.regular(path).open(encoding="utf-8", errors="replace", newline="") as stream:
            rows = list(csv.DictReader(record.lines_of(stream, goes_on=False)))
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
