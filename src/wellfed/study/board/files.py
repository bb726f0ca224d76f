"""Writes ``leaderboard.csv`` for programs and ``leaderboard.html`` for people."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from wellfed.command_line import command
from wellfed.explain.pages.html_page import fill_in
from wellfed.record.files import write_atomically
from wellfed.study.board.columns import METRIC, columns, interval, value_text
from wellfed.study.points.grid import of_one_run
from wellfed.study.points.space import grid_values
from wellfed.study.ranking.board_entry import Leaderboard

CSV = "leaderboard.csv"
NAMES = (CSV, "leaderboard.html")
FIGURES = (
    *("rank", "point", "status", "trial", "state", "tie", "attempt", "samples_per_s", "score", "ci95_low", "ci95_high"),
    *("runs", "of_best", "of_baseline", "of_baseline_low", "of_baseline_high", "readiness_frac", "ceiling_frac"),
    *("peak_memory_gib", "predicted_peak_gib", "energy_per_sample_j", "util_pct", "value", "value_step", "last_value"),
    *("validations", "trained_steps", "seconds", "folder"),
)
"""Columns of the CSV before the axes; ``overrides`` and ``why`` follow. The interval is the score's."""


def write(folder: Path, board: Leaderboard) -> list[Path]:
    """Writes both files, each replaced as a whole, and returns them. An error in drawing the page leaves the other.

    Raises:
        OSError: one can't be written; it is as it was.
    """
    texts: list[Callable[[Leaderboard], str]] = [to_csv, partial(to_html, folder=folder)]
    for name, text_of in zip(NAMES, texts, strict=True):
        # A lone surrogate, as a path on disk may hold, is no UTF-8.
        write_atomically(folder / name, text_of(board).encode("utf-8", errors="replace").decode("utf-8"))
    return [folder / name for name in NAMES]


def to_csv(board: Leaderboard) -> str:
    """Returns a row a point; numbers unrounded, empty where unknown; ``overrides`` can be pasted into a shell."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*FIGURES, *board.file.axis_names, "overrides", "why"])
    for entry in board.entries:
        found = entry.to_dict()
        for name in ("ci95", "of_baseline"):
            ends = entry.ci95 if name == "ci95" else entry.of_baseline_ci95
            found[f"{name}_low"], found[f"{name}_high"] = ends or ("", "")
        typed, why = shlex.join(of_one_run(entry.overrides)), " ".join(entry.why.split())
        writer.writerow([*(found.get(name, "") for name in FIGURES), *entry.values.values(), typed, why])
    return stream.getvalue()


def to_html(board: Leaderboard, folder: Path = Path()) -> str:
    """Returns the page in one file; its commands name the study's ``folder``. Every text of the user's is escaped."""
    of_search, objective = board.is_of_search, board.objective
    values = {
        "board": board,
        "file": board.file,
        "folder": str(folder),
        "objective": objective,
        "of_search": of_search,
        "columns": columns(board),
        "command": command,
        "again": again(board),
        "shown": partial(value_text, board),
        "figure": METRIC,
        "interval": interval,
        "tied": sum(entry.rank == 1 for entry in board.ranked) - 1,
        "top": max((figure for entry in board.ranked for figure in (entry.score or 0, *(entry.ci95 or ()))), default=0),
        "map": heat_map(board),
    }
    return fill_in(Path(__file__).with_name("board.html.j2"), values)


def heat_map(board: Leaderboard) -> Mapping[str, Any] | None:
    """Returns two axes, the longer one downwards, with their entries; None where another number of axes varies, or no
    point has a rank."""
    axes = {} if board.is_of_search else grid_values(board.file.space)
    varied = sorted((axis for axis, values in axes.items() if len(values) > 1), key=lambda axis: -len(axes[axis]))
    if len(varied) != 2 or not board.ranked:
        return None
    down, across = varied
    cells = {(entry.values[down], entry.values[across]): entry for entry in board.entries}
    worst = min(entry.of_best or 0.0 for entry in board.ranked)
    return {"down": down, "across": across, "axes": axes, "cells": cells, "worst": worst}


def again(board: Leaderboard) -> list[str]:
    """Returns the command that trains the best once more; empty without one."""
    best = board.best
    return [] if best is None else [*command("train").split(), *board.file.arguments(best.overrides)]
