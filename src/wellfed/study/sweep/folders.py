"""Finds and reads the folder of a sweep."""

from __future__ import annotations

from pathlib import Path

from wellfed.command_line import command
from wellfed.config.files import folder_lookup
from wellfed.config.files.folder_lookup import FolderKind
from wellfed.errors import ConfigError
from wellfed.study.sweep import grid, ledger
from wellfed.study.sweep.grid import SweepFile
from wellfed.study.sweep.ledger import Read

SWEEP = FolderKind("sweep", grid.FILE_NAME, f"{command('train')} -m sweep=quick")


def find(asked: str | None, log_dir: Path) -> Path:
    """Returns the sweep folder that is meant, None = the newest. Raises as `folder_lookup.find`."""
    return folder_lookup.find(asked, log_dir, SWEEP)


def load(folder: Path) -> tuple[SweepFile, Read]:
    """What a sweep folder holds.

    Raises:
        ConfigError: its files can't be read or are not a sweep's.
    """
    try:
        return SweepFile.read(folder), ledger.read(folder)
    except (OSError, ValueError) as error:
        way_out = "Start the sweep again with the same command: what is in the ledger is kept."
        raise ConfigError.of(str(folder), f"can't be read: {error}", way_out) from error
