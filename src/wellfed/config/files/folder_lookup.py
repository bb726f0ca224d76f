"""Finds the folder of a run, sweep or search, and a run's checkpoint, by the name that a user typed.

A folder is named by its path, its name, a prefix that only one name has, or ``last`` for the newest. Folders lie in
``<log_dir>/<workload>/<runs, sweeps or searches>/<name>``.
"""

from __future__ import annotations

import difflib
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
        """Returns all such folders, newest first; unreadable ones are included, but not an unreadable log dir."""
        try:
            os.listdir(log_dir)
        except PermissionError as error:
            problem = f"can't be looked into: {error.strerror}."
            raise ConfigError.of(str(log_dir), problem, "Name another: --log-dir.") from error
        except (OSError, ValueError):  # there is none
            return []
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
        """Returns whether a folder is of this kind. True for an unreadable folder."""
        try:
            return (folder / self.marker).is_file()
        except PermissionError:
            return True
        except (OSError, ValueError):  # the system refuses it as a path, e.g. a name that is too long
            return False


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
    named = [folder for folder in found if folder.name == asked]
    if len(named) == 1:
        return named[0]
    if not named and asked in (None, LAST) and found:
        return _told(found[0], f"the newest {nouns}")
    if not named and asked and (begun := [folder for folder in found if folder.name.startswith(asked)]):
        if len(begun) == 1:
            return _told(begun[0], f"{asked}...")
        raise ConfigError.of(asked, f"begins {len(begun)} names.", f"Write more of one: {_listed(begun)}.")
    if named:
        plurals = " or ".join(kind.plural for kind in kinds)
        listed = " or ".join(map(str, named))
        raise ConfigError.of(str(asked), f"is the name of {len(named)} {plurals}.", f"Write its folder: {listed}.")
    raise _not_found(asked, log_dir, kinds, found, flag)


def checkpoint(asked: str | None, log_dir: Path, flag: str = "--log-dir") -> Path:
    """Returns a checkpoint: ``asked`` if it is a file, else ``best.ckpt`` or ``last.ckpt`` of that run (see `find`)."""
    if asked and (asked.endswith(".ckpt") or (os.path.isfile(asked) and Path(asked).name != RUN.marker)):
        return Path(asked)
    folder = find(asked, log_dir, RUN, flag=flag)
    places = [folder / "checkpoints" / f"{name}.ckpt" for name in ("best", LAST)]
    if (found := next(filter(Path.is_file, places), None)) is None:
        raise ConfigError.of(
            str(folder), "has no checkpoint.", "Name another run, or a file of its checkpoints folder."
        )
    return found


def _told(folder: Path, what: str) -> Path:
    print(show_text(f"Taking {what}: {folder}"), file=sys.stderr)
    return folder


def _listed(folders: list[Path]) -> str:
    more = f" and {len(folders) - _LISTED} more" if len(folders) > _LISTED else ""
    return f"{', '.join(map(str, folders[:_LISTED]))}{more}"


def _not_found(
    asked: str | None, log_dir: Path, kinds: tuple[FolderKind, ...], known: list[Path], flag: str
) -> ConfigError:
    nouns, plurals = (" or ".join(words) for words in zip(*((kind.noun, kind.plural) for kind in kinds), strict=True))
    makes_one = f"{kinds[0].first_command} makes one. {plurals.capitalize()} elsewhere: write the folder, or {flag}."
    if asked in (None, LAST):
        return ConfigError.of(str(log_dir), f"there is no {nouns} in it yet.", makes_one)
    assert asked is not None
    if asked and os.path.isdir(asked):
        markers = " or ".join(kind.marker for kind in kinds)
        problem = f"is a folder without {markers}, so no {nouns}'s."
    else:
        places = " or ".join(f"{log_dir}/*/{kind.plural}" for kind in kinds)
        problem = f"is neither a folder nor the name of a {nouns} in {places}."
    if not known:
        return ConfigError.of(asked or "''", problem, f"There is no {nouns} in {log_dir} yet: {makes_one}")
    close = difflib.get_close_matches(asked, [path.name for path in known], n=1)
    meant = f"Did you mean {close[0]}? " if close else ""
    return ConfigError.of(asked or "''", problem, f"{meant}There are: {_listed(known)}.")
