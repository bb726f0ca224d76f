"""Shows the ranks of a sweep or a search, and rewrites its files (``python -m wellfed leaderboard SWEEP``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from wellfed.cli.output import Answer
from wellfed.cli.which_run import add_log_dir
from wellfed.command_line import command
from wellfed.errors import EXIT_OK, ConfigError
from wellfed.explain.report.text_table import console_width
from wellfed.record.folder_lookup import find
from wellfed.study.board import files
from wellfed.study.board.terminal import show
from wellfed.study.ranking.ranking import board_of
from wellfed.study.study_files import SEARCH, SWEEP


def main(argv: Sequence[str]) -> int:
    """Prints the ranks and rewrites the files."""
    parser = argparse.ArgumentParser(
        prog=command("leaderboard"),
        description="The ranks of a sweep or a search, from the records of its trials; writes its files anew.",
    )
    add_sweep(parser)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    asked = parser.parse_args(argv)
    folder = find(asked.sweep, Path(asked.log_dir), SWEEP, SEARCH)
    board = board_of(folder)
    try:
        written = files.write(folder, board)
    except OSError as error:
        problem = f"can't be written to: {error.strerror or error}."
        raise ConfigError.of(str(folder), problem, "Free space, or make the folder writable.") from error
    if asked.json:
        Answer().show_json(board.to_dict())
    else:
        show(Answer(width=console_width()), board, written)
    return EXIT_OK


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a sweep."""
    parser.add_argument(
        "sweep", metavar="SWEEP", nargs="?", help="its folder, its name or the beginning of it (default: the newest)"
    )
    add_log_dir(parser, "sweeps")
