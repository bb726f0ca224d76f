"""Shows a leaderboard on the terminal: the best ranks, what has none and why, what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from wellfed.command_line import command
from wellfed.explain.report.text_table import TextTable, print_command, print_text
from wellfed.study.board.columns import columns, value_text
from wellfed.study.board.files import again
from wellfed.study.ranking.board_entry import Leaderboard

_SHOWN = 20
"""Ranks on the terminal; the files have all."""


def show(console: Console, board: Leaderboard, written: Sequence[Path]) -> None:
    """Prints ranks, what has none and why, notes and the files ``written``."""
    say, folder = partial(print_text, console), written[0].parent
    counts = ", ".join(f"{number} {status}" for status, number in board.counts.items())
    study = f"{board.file.folder_kind.noun.capitalize()} {board.file.name} of {board.file.workload}"
    most = "most" if board.objective.higher_is_better else "least"
    by = f" by {board.objective.title} ({most} is best)" if board.is_of_search else ""
    say(f"\n{study}{by}: {counts or 'no trial'}")
    if board.ranked:
        console.print(_ranks(board))
        if len(board.ranked) > _SHOWN:
            console.print(f"... and {len(board.ranked) - _SHOWN} more in the files")
    for entry in board.failed:
        values = " ".join(f"{axis}={value_text(board, value)}" for axis, value in entry.values.items())
        say(f"{entry.status}: {values}: {entry.why}")
    for note in board.notes:
        say(note)
    if board.best is not None and board.is_of_search:
        say(f"Best: {folder / board.best.row.folder}")
        print_command(console, "Train it again:", shlex.join(again(board)))
    elif board.best is not None:
        choose = f"{command('choose')} {shlex.quote(str(folder))} --name mine"
        print_command(console, f"Keep the {board.objective.best}:", choose)
    say(f"Files: {', '.join(map(str, written))}")


def _ranks(board: Leaderboard) -> TextTable:
    shown = [column for column in columns(board) if not column.in_files_alone]
    numbers, axes = ["rank", *(["trial"] if board.is_of_search else [])], board.file.axis_names
    heads = [column.head for column in shown]
    table = TextTable(*numbers, *axes, *heads, numbers=[*numbers, *heads])
    for entry in board.ranked[:_SHOWN]:
        number = [str(entry.row.trial)] if board.is_of_search else []
        values = (value_text(board, entry.values[axis]) for axis in axes)
        table.add_row(entry.label, *number, *values, *(column.text(entry) for column in shown))
    return table
