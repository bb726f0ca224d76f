"""Shows the leaderboard of a search on the terminal: ranks, what was pruned or failed, how to train the best again."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from wellfed.study.search.board_columns import columns
from wellfed.study.search.board_files import NAMES, again
from wellfed.study.search.search_board import SearchBoard
from wellfed.study.search.space import show_value
from wellfed.units import counted

_SHOWN = 20
"""Ranks on the terminal; the files have all."""


def show(console: Console, board: SearchBoard, folder: Path) -> None:
    """Ranks, what has none and why, what to know, and the files."""
    file = board.search
    counts = ", ".join(f"{number} {state}" for state, number in board.counts.items())
    arrow = "most" if file.higher_is_better else "least"
    console.print(
        f"\nSearch {file.name} of {file.workload} by val/{file.metric} ({arrow} is best): {counts or 'no trial'}",
        soft_wrap=True,
    )
    if board.ranked:
        console.print(_ranks(board))
        if len(board.ranked) > _SHOWN:
            console.print(f"... and {len(board.ranked) - _SHOWN} more in the files")
    if board.pruned:
        numbers = ", ".join(str(entry.trial) for entry in board.pruned)
        console.print(f"Pruned: {counted(len(board.pruned), 'trial')} ({numbers})", soft_wrap=True)
    for entry in board.failed:
        values = " ".join(f"{axis}={show_value(value)}" for axis, value in entry.values.items())
        console.print(f"{entry.status}: {values}: {entry.why}", soft_wrap=True)
    for note in board.notes:
        console.print(note, soft_wrap=True)
    if board.best is not None:
        console.print(f"Best: {folder / board.best.folder}", soft_wrap=True)
        console.print(f"Train it again: {shlex.join(again(board))}", soft_wrap=True)
    console.print(f"Files: {', '.join(str(folder / name) for name in NAMES)}", soft_wrap=True)


def _ranks(board: SearchBoard) -> Table:
    shown = columns(board)
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("trial", justify="right", no_wrap=True)
    for axis in board.search.space:
        table.add_column(axis, overflow="fold", min_width=len(axis))
    for column in shown:
        table.add_column(column.head, justify="right", no_wrap=True)
    for entry in board.ranked[:_SHOWN]:
        cells = [column.text(entry) for column in shown]
        values = [show_value(entry.values[axis]) for axis in board.search.space]
        table.add_row(str(entry.rank), str(entry.trial), *values, *cells)
    return table
