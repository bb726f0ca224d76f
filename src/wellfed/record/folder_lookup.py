"""Finds the folder of a run, sweep or search, and a run's checkpoint, by the name that a user typed.

A folder is named by its path, its name, a prefix that only one name has, or ``last`` for the newest. Folders lie in
``<log_dir>/<workload>/<runs, sweeps or searches>/<name>``.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from wellfed.command_line import command
from wellfed.errors import ConfigError
from wellfed.units import show_text

LAST = "last"
_TIME = re.compile(r"\d{4}-\d\d-\d\d")
"""Beginning of an automatic folder name."""
_LISTED = 12
"""Maximum number of folders in a message."""


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder to look up: runs, sweeps or searches."""

    noun: str
    marker: str
    """Name of a file that every such folder has."""
    first_command: str

    @property
    def plural(self) -> str:
        """Plural of the noun: name of the folder that holds all of them."""
        return f"{self.noun}es" if self.noun.endswith("ch") else f"{self.noun}s"

    def all(self, log_dir: Path) -> list[Path]:
        """Returns all such folders, newest first."""
        found = [path for path in log_dir.glob(f"*/{self.plural}/*") if self.is_in(path)]
        return sorted(sorted(found), key=self.time, reverse=True)

    def time(self, folder: Path) -> str:
        """Returns the start time from the name, else the time of the last write to the marker."""
        if _TIME.match(folder.name):
            return folder.name
        with suppress(OSError):
            return f"{datetime.fromtimestamp((folder / self.marker).stat().st_mtime):%Y-%m-%d_%H-%M-%S.%f}"
        return ""

    def is_in(self, folder: Path) -> bool:
        """Returns whether a folder is of this kind."""
        return os.path.isfile(folder / self.marker)


RUN = FolderKind("run", "run.json", command("train"))


def find(asked: str | None, log_dir: Path, *kinds: FolderKind, flag: str = "--log-dir") -> Path:
    """Returns the folder named by ``asked``. Prints its name on stderr, unless its path or whole name was given.

    Args:
        asked: path of the folder or of a file in it, its name, a unique prefix of the name, or `LAST`; None = `LAST`.
        flag: flag that sets the log dir, for messages.

    Raises:
        ConfigError: none or several match; the message lists them.
    """
    path = Path(asked or "")
    for folder in (path, *path.parents[:2]) if asked else ():
        if any(kind.is_in(folder) for kind in kinds) and (folder is path or os.path.isfile(path)):
            return folder
    known = [(kind.time(folder), folder) for kind in kinds for folder in kind.all(log_dir)]
    found = [folder for _, folder in sorted(known, key=lambda one: one[0], reverse=True)]
    nouns = " or ".join(kind.noun for kind in kinds)
    if not found:
        elsewhere = f"{kinds[0].first_command} makes one. If there is one in another folder: write it, or {flag}."
        where = str(log_dir) if asked in (None, LAST) else str(asked) or "''"
        raise ConfigError.of(where, f"there is no {nouns} in {log_dir} yet.", elsewhere)
    begun, taken = [folder for folder in found if asked and folder.name.startswith(asked)], f"{asked}..."
    named = [folder for folder in begun if folder.name == asked] or begun
    if not named and asked in (None, LAST):
        named, taken = found[:1], f"the newest {nouns}"
    if len(named) > 1:
        problem = f"may be any of {len(named)} folders."
        raise ConfigError.of(str(asked), problem, f"Write one: {_listed(named)}.")
    if not named:
        problem = f"is neither the folder nor the name of a {nouns} in {log_dir}."
        raise ConfigError.of(asked or "''", problem, f"There are: {_listed(found)}.")
    if named[0].name != asked:
        print(show_text(f"Taking {taken}: {named[0]}"), file=sys.stderr)
    return named[0]


def checkpoint(asked: str | None, log_dir: Path, flag: str = "--log-dir") -> Path:
    """Returns a checkpoint: ``asked`` if it is a file, else ``best.ckpt`` or ``last.ckpt`` of that run (see `find`)."""
    if asked and (asked.endswith(".ckpt") or (os.path.isfile(asked) and Path(asked).name != RUN.marker)):
        return Path(asked)
    folder = find(asked, log_dir, RUN, flag=flag)
    found = next((path for name in ("best", LAST) if (path := folder / "checkpoints" / f"{name}.ckpt").is_file()), None)
    if found is None:
        way_out = "Name another run, or a file of its checkpoints folder."
        raise ConfigError.of(str(folder), "has no checkpoint.", way_out)
    return found


def _listed(folders: list[Path]) -> str:
    more = f" and {len(folders) - _LISTED} more" if len(folders) > _LISTED else ""
    return f"{', '.join(map(str, folders[:_LISTED]))}{more}"
