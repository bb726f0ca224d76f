"""Copies the leaderboard of a sweep into wandb as a table, when all is measured, so that it disturbs no figure."""

from __future__ import annotations

import csv
from pathlib import Path

from wellfed.config.schema import LoggerConfig
from wellfed.observe.loggers import wandb_sink
from wellfed.study.board.files import CSV
from wellfed.study.study_files import SweepFile


def publish(folder: Path, file: SweepFile, logger: LoggerConfig) -> None:
    """Copies ``leaderboard.csv`` into a run of its own.

    Raises:
        Exception: wandb can't be started.
        OSError: there is no leaderboard.
    """
    with (folder / CSV).open(encoding="utf-8", newline="") as stream:
        columns, *table = csv.reader(stream)
    sink = wandb_sink.open_run(
        folder,
        mode=wandb_sink.decide_mode(logger.mode.value),
        project=logger.project,
        entity=logger.entity,
        group=logger.group or f"{file.workload}/{file.name}",
        run_id=None,
        name=f"{file.name} leaderboard",
        config={"sweep": file.to_dict()},
    )
    sink.table("leaderboard", columns, table)
    sink.finish({"points": len(table)}, 0)
