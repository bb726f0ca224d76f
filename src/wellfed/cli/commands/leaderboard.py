"""Shows the ranks of a sweep or a search, and writes its files anew (``python -m wellfed leaderboard SWEEP``)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wellfed.cli.answer import Answer
from wellfed.cli.which_run import add_log_dir
from wellfed.command_line import command
from wellfed.config.files.folder_lookup import find
from wellfed.errors import EXIT_OK, ConfigError
from wellfed.study.search import board_files, board_terminal, search_folders
from wellfed.study.sweep import folders, leaderboard_files
from wellfed.study.sweep.leaderboard_terminal import show, width
from wellfed.study.sweep.ranking import leaderboard


def main(argv: Sequence[str]) -> int:
    """Prints the ranks and writes the files anew."""
    parser = argparse.ArgumentParser(
        prog=command("leaderboard"),
        description="The ranks of a sweep or a search, from its ledger; writes its files anew.",
    )
    add_sweep(parser)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    asked = parser.parse_args(argv)
    folder = find(asked.sweep, Path(asked.log_dir), folders.SWEEP, search_folders.SEARCH)
    if search_folders.is_of_search(folder):
        _show_search(folder, as_json=asked.json)
        return EXIT_OK
    board = leaderboard(*folders.load(folder))
    with _writing(folder):
        written = leaderboard_files.write(folder, board)
    if asked.json:
        Answer().show_json(board.to_dict())
    else:
        show(Answer(width=width()), board, written)
    return EXIT_OK


def _show_search(folder: Path, *, as_json: bool) -> None:
    board = search_folders.load(folder)
    with _writing(folder):
        board_files.write(folder, board)
    if as_json:
        Answer().show_json(board.to_dict())
    else:
        board_terminal.show(Answer(width=width()), board, folder)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"can't be written to: {error.strerror or error}."
        raise ConfigError.of(str(folder), problem, "Free space, or make the folder writable.") from error


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Adds the words that name a sweep."""
    parser.add_argument(
        "sweep", metavar="SWEEP", nargs="?", help="its folder, its name or the beginning of it (default: the newest)"
    )
    add_log_dir(parser, "sweeps")
