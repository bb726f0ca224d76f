"""Finds a sweep by what a user calls it, in ``<log_dir>/<workload>/sweeps/<name>``, and reads it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from wellfed.errors import ConfigError, Fault
from wellfed.sweep import grid, ledger
from wellfed.sweep.grid import SweepFile
from wellfed.sweep.ledger import Read

_LISTED = 12
"""Most sweeps that a message lists."""


def find(asked: str, log_dir: Path) -> Path:
    """The sweep folder that is meant: a folder, or the name of a sweep of any workload.

    Raises:
        ConfigError: there is none of that name, or more than one; lists what there is.
    """
    folder = Path(asked)
    if asked and _is(Path.is_file, folder / grid.FILE_NAME):
        return folder
    known = sorted(path.parent for path in log_dir.glob(f"*/sweeps/*/{grid.FILE_NAME}"))
    named = [path for path in known if path.name == asked]
    if len(named) == 1:
        return named[0]
    if named:
        listed = " or ".join(map(str, named))
        raise ConfigError([Fault(asked, f"is the name of {len(named)} sweeps.", f"Write its folder: {listed}.")])
    if asked and _is(Path.is_dir, folder):
        problem = f"is a folder without {grid.FILE_NAME}, so no sweep's."
    else:
        problem = f"is neither a folder nor the name of a sweep in {log_dir}/*/sweeps."
    if not known:
        way_out = (
            f"There is no sweep in {log_dir} yet: python src/train.py -m sweep=quick makes one. "
            "Sweeps elsewhere: write the folder, or --log-dir."
        )
    else:
        close = difflib.get_close_matches(asked, [path.name for path in known], n=1)
        meant = f"Did you mean {close[0]}? " if close else ""
        more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
        way_out = f"{meant}There are: {', '.join(map(str, known[:_LISTED]))}{more}."
    raise ConfigError([Fault(asked or "''", problem, way_out)])


def load(folder: Path) -> tuple[SweepFile, Read]:
    """What a sweep folder holds.

    Raises:
        ConfigError: its files can't be read or are not a sweep's.
    """
    try:
        return SweepFile.read(folder), ledger.read(folder)
    except (OSError, ValueError) as error:
        way_out = "Start the sweep again with the same command: what is in the ledger is kept."
        raise ConfigError([Fault(str(folder), f"can't be read: {error}", way_out)]) from error


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    """What the system takes for no path is neither: a name that is too long, a folder that may not be looked into."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False
