"""Writes ``leaderboard.csv`` for programs and ``leaderboard.html`` for people."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wellfed.command_line import command
from wellfed.explain.pages.html_page import fill_in
from wellfed.record.files import write_atomically
from wellfed.study.board.columns import columns, figure_text, interval, value_text
from wellfed.study.points.grid import of_one_run
from wellfed.study.points.space import grid_values
from wellfed.study.ranking.board_entry import Entry, Leaderboard


@dataclass(frozen=True)
class HeatMap:
    """Two axes against each other, the longer one downwards."""

    down: str
    across: str
    values: Mapping[str, tuple[str, ...]]
    """Values of each axis."""
    cells: Mapping[tuple[str, str], Entry]
    """Entry by its values."""
    lowest: float
    """`Entry.of_best` of the worst entry."""

    def heat(self, entry: Entry) -> float:
        """Returns 0 for the worst entry to 1 for the best."""
        return 1.0 if self.lowest == 1 else ((entry.of_best or 0.0) - self.lowest) / (1 - self.lowest)


def heat_map(board: Leaderboard) -> HeatMap | None:
    """Returns the map of two axes; None where another number of axes varies, or no point has a rank."""
    axes = {} if board.is_of_search else grid_values(board.file.space)
    varied = sorted((axis for axis, values in axes.items() if len(values) > 1), key=lambda axis: -len(axes[axis]))
    if len(varied) != 2 or not board.ranked:
        return None
    down, across = varied
    cells = {(entry.values[down], entry.values[across]): entry for entry in board.entries}
    return HeatMap(down, across, axes, cells, min(entry.of_best or 0.0 for entry in board.ranked))


CSV = "leaderboard.csv"
NAMES = (CSV, "leaderboard.html")
TIMED_COLUMNS = (
    *("rank", "point", "status", "tie", "attempt", "samples_per_s", "score", "ci95_low", "ci95_high", "runs"),
    *("of_best", "of_baseline", "of_baseline_low", "of_baseline_high", "readiness_frac", "ceiling_frac"),
    *("peak_memory_gib", "predicted_peak_gib"),
    *("energy_per_sample_j", "util_pct", "seconds", "folder"),
)
"""Columns of a sweep's CSV before the axes; ``overrides`` and ``error`` follow. The interval is the score's."""
TRAINING_COLUMNS = (
    *("rank", "trial", "point", "state", "status", "value", "value_step", "last_value", "validations"),
    *("trained_steps", "samples_per_s", "peak_memory_gib", "seconds", "attempt", "folder"),
)
"""Columns of a search's CSV before the axes; ``overrides`` and ``why`` follow."""


def write(folder: Path, board: Leaderboard) -> list[Path]:
    """Writes both files, each replaced as a whole, and returns them. An error in drawing the page leaves the rest.

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
    own, last = (TRAINING_COLUMNS, "why") if board.is_of_search else (TIMED_COLUMNS, "error")
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*own, *board.file.axis_names, "overrides", last])
    for entry in board.entries:
        figures = _figures(entry)
        is_told = board.is_of_search or entry.row.error is not None
        why = " ".join(entry.why.split()) if is_told else ""
        typed = shlex.join(of_one_run(entry.overrides))
        writer.writerow([*(figures.get(name, "") for name in own), *entry.values.values(), typed, why])
    return stream.getvalue()


def _figures(entry: Entry) -> dict[str, Any]:
    low, high = entry.ci95 or (None, None)
    worst, most = entry.of_baseline_ci95 or (None, None)
    figures = {**entry.to_dict(), "ci95_low": low, "ci95_high": high}
    return figures | {"of_baseline_low": worst, "of_baseline_high": most}


def to_html(board: Leaderboard, folder: Path = Path()) -> str:
    """Returns the page in one file; its commands name the study's ``folder``. Every text of the user's is escaped."""
    of_search, objective = board.is_of_search, board.objective
    values = {
        "board": board,
        "file": board.file,
        "folder": str(folder),
        "objective": objective,
        "of_search": of_search,
        "noun": "trial" if of_search else "point",
        "direction": f"{'most' if objective.higher_is_better else 'least'} is best",
        "nothing": "No trial has trained to its end." if of_search else f"No point has {objective.a_noun}.",
        "without": "Failed" if of_search else f"Without {objective.a_noun}",
        "columns": columns(board),
        "command": command,
        "again": again(board),
        "shown": partial(value_text, board),
        "figure": figure_text,
        "interval": interval,
        "tied": sum(entry.rank == 1 for entry in board.ranked) - 1,
        "top": max((figure for entry in board.ranked for figure in (entry.score or 0, *(entry.ci95 or ()))), default=0),
        "map": heat_map(board),
    }
    return fill_in(Path(__file__).with_name("board.html.j2"), values)


def again(board: Leaderboard) -> list[str]:
    """Returns the command that trains the best once more; empty without one."""
    best = board.best
    return [] if best is None else [*command("train").split(), *board.file.arguments(best.overrides)]
