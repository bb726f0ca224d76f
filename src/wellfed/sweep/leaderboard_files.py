"""Writes ``leaderboard.csv`` for programs, ``leaderboard.md`` and ``leaderboard.html`` for people."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from pathlib import Path

from wellfed.record import write_atomically
from wellfed.sweep.leaderboard import Entry, Leaderboard
from wellfed.sweep.leaderboard_columns import columns
from wellfed.sweep.leaderboard_html import to_html
from wellfed.units import counted, show_percent

CSV_COLUMNS = (
    "rank",
    "point",
    "status",
    "tie",
    "attempt",
    "samples_per_s",
    "score",
    "ci95_low",
    "ci95_high",
    "runs",
    "of_best",
    "of_baseline",
    "readiness_frac",
    "ceiling_frac",
    "peak_memory_gib",
    "predicted_peak_gib",
    "energy_per_sample_j",
    "util_pct",
    "seconds",
    "on_front",
    "marks",
    "folder",
)
"""Before the axes; behind them come ``overrides`` and ``error``. The interval is the score's."""
CSV = "leaderboard.csv"
_ESCAPED = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {special: f"&#{ord(special)};" for special in "|`*_~[]\\"}
)


def write(folder: Path, board: Leaderboard) -> list[Path]:
    """The three files, each replaced as a whole.

    Raises:
        OSError: one can't be written; it is as it was.
    """
    texts = {
        CSV: to_csv(board),
        "leaderboard.md": to_markdown(board),
        "leaderboard.html": to_html(board),
    }
    for name, text in texts.items():
        # A lone surrogate, as a path on disk may hold, is no UTF-8.
        write_atomically(folder / name, text.encode("utf-8", errors="replace").decode("utf-8"))
    return [folder / name for name in texts]


def to_csv(board: Leaderboard) -> str:
    """A row a point; numbers unrounded, empty where nothing is known; ``overrides`` can be pasted into a shell."""
    stream = io.StringIO()
    writer = csv.writer(_Lines(stream), lineterminator="\r\n")  # with this end a lone \r in a cell is quoted too
    writer.writerow([*CSV_COLUMNS, *board.axes, "overrides", "error"])
    for entry in board.entries:
        low, high = entry.ci95 or (None, None)
        figures = {**vars(entry), "ci95_low": low, "ci95_high": high, "marks": "; ".join(entry.marks)}
        cells = [figures[name] for name in CSV_COLUMNS]
        error = "" if entry.error is None else entry.why
        writer.writerow([*cells, *entry.values.values(), shlex.join(entry.overrides), error])
    return stream.getvalue()


class _Lines:
    """What the CSV writer writes to: each row ends in a line feed alone."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    def write(self, row: str) -> None:
        self._stream.write(row.removesuffix("\r\n") + "\n")


def to_markdown(board: Leaderboard) -> str:
    """The same for a page in a repository: ranks, what failed, which knob mattered, notes."""
    parts = [f"# Sweep {_plain(board.name)}: {_plain(board.workload)}", summary(board), *_ranks(board)]
    if board.unranked:
        rows = [[_code(e.point), e.status, *_values(e), _plain(e.why)] for e in board.unranked]
        parts += [
            f"## Without {board.objective.a_noun}",
            *_table(["point", "status", *map(_code, board.axes), "why"], rows),
        ]
    parts += ["## Which knob mattered", *_effects(board)]
    if board.notes:
        parts += ["## Notes", "\n".join(f"- {_plain(note)}" for note in board.notes)]
    return "\n\n".join(parts) + "\n"


def summary(board: Leaderboard) -> str:
    """How many points there are and what became of them, and where they ran."""
    counts = ", ".join(f"{number} {status}" for status, number in board.counts.items())
    shared = f" All with {_code(shlex.join(board.fixed))}." if board.fixed else ""
    return (
        f"{counted(len(board.entries), 'point')}: {counts}. {_plain(board.machine)}; code {_plain(board.code)}.{shared}"
    )


def _ranks(board: Leaderboard) -> list[str]:
    figures = columns(board)
    head = ["rank", "point", *map(_code, board.axes), *(_plain(column.head) for column in figures)]
    rows = [
        [
            entry.label,
            _code(entry.point) + (f" ({_plain('; '.join(entry.marks))})" if entry.marks else ""),
            *_values(entry),
            *(column.text(entry) for column in figures),
        ]
        for entry in board.ranked
    ]
    return ["## Ranks", *(_table(head, rows) if rows else [f"No point has {board.objective.a_noun}."])]


def _effects(board: Leaderboard) -> list[str]:
    effects = board.effects
    rows = [[_code(axis), show_percent(effects.shares[axis])] for axis in effects.by_importance]
    if effects.rest is not None:
        rows.append(["interactions and noise", show_percent(effects.rest)])
    absent = [f"- {_code(axis)}: {_plain(why)}." for axis, why in effects.absent.items()]
    notes = [_plain(note) for note in effects.notes]
    table = _table(["knob", f"share of the variance of log {board.objective.noun}"], rows) if rows else []
    return [*table, *(["\n".join(absent)] if absent else []), *notes]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["\n".join(f"| {' | '.join(line)} |" for line in lines)]


def _values(entry: Entry) -> list[str]:
    return [_code(value) for value in entry.values.values()]


def _code(text: str) -> str:
    """In a code span, which no Markdown in it leaves; a bar would end the cell even there."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _plain(text: str) -> str:
    """Text in a line, in which nothing is Markdown or HTML."""
    return " ".join(text.translate(_ESCAPED).split())
