"""Shows the leaderboard on the terminal: the best ranks, what has none and why, which knob mattered."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from wellfed.command_line import command
from wellfed.study.sweep.leaderboard_columns import columns
from wellfed.study.sweep.ranking import Entry, Leaderboard
from wellfed.units import show_percent

_SHOWN = 20
"""Ranks on the terminal; the files have all."""
PIPED_COLUMNS = 160
"""Width where the output is no terminal; 80 is too narrow for the ranks."""


def width() -> int | None:
    """Of a console; None = the terminal's."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return None if is_terminal else PIPED_COLUMNS


def show(console: Console, board: Leaderboard, written: Sequence[Path]) -> None:
    """Ranks, what has none and why, which knob mattered, what to know, and the files."""
    counts = ", ".join(f"{number} {status}" for status, number in board.counts.items())
    console.print(f"\nSweep {board.sweep.name} of {board.sweep.workload}: {counts}", soft_wrap=True)
    if board.ranked:
        console.print(_ranks(board))
        if len(board.ranked) > _SHOWN:
            console.print(f"... and {len(board.ranked) - _SHOWN} more in the files")
    for entry in board.unranked:
        console.print(f"{entry.status}: {_values(entry)}: {entry.why}", soft_wrap=True)
    shares = ", ".join(f"{axis} {show_percent(board.effects.shares[axis])}" for axis in board.effects.by_importance)
    if shares:
        rest = "" if board.effects.rest is None else f", interactions and noise {show_percent(board.effects.rest)}"
        console.print(f"Which knob mattered (share of variance): {shares}{rest}", soft_wrap=True)
    for note in (*board.effects.notes, *board.notes):
        console.print(note, soft_wrap=True)
    if board.ranked:
        folder = shlex.quote(str(written[0].parent))
        console.print(f"Keep the {board.objective.best}: {command('choose')} {folder} --name mine", soft_wrap=True)
    console.print(f"Files: {', '.join(map(str, written))}", soft_wrap=True)


def _ranks(board: Leaderboard) -> Table:
    shown = [column for column in columns(board) if not column.in_files_alone]
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right", no_wrap=True)
    for axis in board.sweep.axes:
        table.add_column(axis, overflow="fold", min_width=len(axis))
    for column in shown:
        table.add_column(column.head, justify="right", no_wrap=True)
    for entry in board.ranked[:_SHOWN]:
        cells = [column.text(entry) for column in shown]
        table.add_row(entry.label, *(entry.values[axis] for axis in board.sweep.axes), *cells)
    return table


def _values(entry: Entry) -> str:
    return " ".join(f"{axis}={value}" for axis, value in entry.values.items())
