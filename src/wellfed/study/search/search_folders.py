"""Reads the folder of a search."""

from __future__ import annotations

from pathlib import Path

from wellfed.command_line import command
from wellfed.config.files.folder_lookup import FolderKind
from wellfed.errors import ConfigError
from wellfed.study.search.curves import read_curve
from wellfed.study.search.search_board import SearchBoard, board
from wellfed.study.search.search_file import FILE_NAME, SearchFile
from wellfed.study.search.search_rows import SearchRow
from wellfed.study.sweep import ledger

SEARCH = FolderKind("search", FILE_NAME, f"{command('train')} -m workload.optimizer.lr=0.01,0.001")


def is_of_search(folder: Path) -> bool:
    """Whether a folder is a search's."""
    return (folder / FILE_NAME).exists()


def load(folder: Path) -> SearchBoard:
    """What a search folder holds.

    Raises:
        ConfigError: its files can't be read or are not a search's.
    """
    try:
        file, found = SearchFile.read(folder), ledger.read_rows(folder, SearchRow)
    except (OSError, ValueError) as error:
        way_out = "Start the search again with the same command: what is in the ledger is kept."
        raise ConfigError.of(str(folder), f"can't be read: {error}", way_out) from error
    curves = {row.folder: read_curve(folder / row.folder, file.metric) for row in found.latest().values() if row.folder}
    return board(file, found, curves)
