"""Writes ``leaderboard.csv`` for programs, ``leaderboard.md`` and ``leaderboard.html`` for people."""

from __future__ import annotations

import csv
import io
import re
import shlex
from pathlib import Path

from wellfed.explain.pages.markdown_text import code_span, plain_line
from wellfed.record import write_atomically
from wellfed.study.sweep.leaderboard_html import page, to_html
from wellfed.study.sweep.ranking import Leaderboard
from wellfed.units import spreadsheet_cell

CSV_COLUMNS = (
    *("rank", "point", "status", "tie", "attempt", "samples_per_s", "score", "ci95_low", "ci95_high", "runs"),
    *("of_best", "of_baseline", "of_baseline_low", "of_baseline_high", "readiness_frac", "ceiling_frac"),
    *("peak_memory_gib", "predicted_peak_gib"),
    *("energy_per_sample_j", "util_pct", "seconds", "on_front", "marks", "folder"),
)
"""Before the axes; behind them come ``overrides`` and ``error``. The interval is the score's."""
CSV = "leaderboard.csv"


def write(folder: Path, board: Leaderboard) -> list[Path]:
    """The three files, each replaced as a whole.

    Raises:
        OSError: one can't be written; it is as it was.
    """
    texts = {CSV: to_csv(board), "leaderboard.md": to_markdown(board), "leaderboard.html": to_html(board)}
    for name, text in texts.items():
        # A lone surrogate, as a path on disk may hold, is no UTF-8.
        write_atomically(folder / name, text.encode("utf-8", errors="replace").decode("utf-8"))
    return [folder / name for name in texts]


def to_csv(board: Leaderboard) -> str:
    """A row a point; numbers unrounded, empty where nothing is known; ``overrides`` can be pasted into a shell."""
    stream = io.StringIO()
    writer = csv.writer(_Lines(stream), lineterminator="\r\n")  # with this end a lone \r in a cell is quoted too
    writer.writerow(map(spreadsheet_cell, [*CSV_COLUMNS, *board.sweep.axes, "overrides", "error"]))
    for entry in board.entries:
        low, high = entry.ci95 or (None, None)
        worst, most = entry.of_baseline_ci95 or (None, None)
        figures = {**vars(entry), "ci95_low": low, "ci95_high": high, "marks": "; ".join(entry.marks)}
        figures |= {"of_baseline_low": worst, "of_baseline_high": most}
        cells = [figures[name] for name in CSV_COLUMNS]
        error = "" if entry.error is None else entry.why
        texts = [*entry.values.values(), shlex.join(entry.overrides), error]
        writer.writerow(map(spreadsheet_cell, [*cells, *texts]))
    return stream.getvalue()


class _Lines:
    """What the CSV writer writes to: each row ends in a line feed alone."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def write(self, row: str) -> None:
        self._stream.write(row.removesuffix("\r\n") + "\n")


def to_markdown(board: Leaderboard) -> str:
    """The same for a page in a repository: ranks, what failed, which knob mattered, notes."""
    text = page("leaderboard.md.j2", board, autoescape=False, filters={"code": code_span, "plain": plain_line})
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
