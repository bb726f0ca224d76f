"""Lists and clears the entries of paths.cache_dir (``python -m wellfed cache list|clear``)."""

from __future__ import annotations

import argparse
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from wellfed.cli.output import Answer
from wellfed.command_line import command
from wellfed.config.schema import PathsConfig
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError
from wellfed.units import counted, show_bytes

_ENTRY = re.compile(r"[0-9a-f]{16}")
"""Name of an entry: its digest. One that is being made has a suffix, and stays."""
_DAY_S = 24 * 3600


class CacheEntry(NamedTuple):
    """A folder of the cache."""

    kind: str
    name: str
    bytes: int
    age_days: float


def main(argv: Sequence[str]) -> int:
    """Prints the entries, or removes them."""
    parser = argparse.ArgumentParser(
        prog=command("cache"),
        description="What is kept under paths.cache_dir, so that it is made once, such as data that workloads have "
        "prepared. All of it is made again when it is needed. Clear it while no run uses it.",
    )
    parser.add_argument("what", choices=("list", "clear"), help="show all entries, or remove them")
    parser.add_argument("kind", nargs="?", metavar="KIND", help="only this kind")
    default = PathsConfig.cache_dir
    parser.add_argument("--cache-dir", default=default, metavar="DIR", help=f"where it lies (default: {default})")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    asked = parser.parse_args(argv)
    home, terminal = Path(asked.cache_dir).expanduser(), Answer()
    every = entries(home)
    kinds = {entry.kind for entry in every}
    if asked.kind is not None and asked.kind not in kinds:
        there = f"There are: {', '.join(sorted(kinds))}." if kinds else "Nothing is kept there."
        raise ConfigError.of(asked.kind, f"is no kind of what {home} holds.", there)
    asked_for = found = [entry for entry in every if asked.kind in (None, entry.kind)]
    if asked.what == "clear":
        for entry in asked_for:
            shutil.rmtree(home / entry.kind / entry.name, ignore_errors=True)
        found = [entry for entry in asked_for if not (home / entry.kind / entry.name).exists()]
    if asked.json:
        terminal.show_json([entry._asdict() for entry in found])
        return EXIT_OK if found == asked_for else EXIT_FAILED
    for entry in found:
        age = counted(int(entry.age_days), "day")
        terminal.print(f"{entry.kind}/{entry.name}  {show_bytes(entry.bytes):>10}  {age:>9}", soft_wrap=True)
    size = show_bytes(sum(entry.bytes for entry in found))
    done = "removed" if asked.what == "clear" else "kept"
    terminal.print(f"{home}: {counted(len(found), 'folder')} {done}, {size}", soft_wrap=True)
    return EXIT_OK if found == asked_for else EXIT_FAILED


def entries(home: Path) -> list[CacheEntry]:
    """Returns all entries by kind, the largest first; other files and folders are ignored."""
    found = []
    for folder in home.glob("*/*"):
        if _is_entry(folder):
            seen = [path.stat() for path in folder.rglob("*") if path.is_file()]
            age_s = max(0.0, time.time() - max((one.st_mtime for one in seen), default=folder.stat().st_mtime))
            size = sum(one.st_size for one in seen)
            found.append(CacheEntry(folder.parent.name, folder.name, size, age_s / _DAY_S))
    return sorted(found, key=lambda entry: (entry.kind, -entry.bytes, entry.name))


def _is_entry(folder: Path) -> bool:
    """Returns whether a folder is an entry. A digest as name is not enough: it needs a lock beside it."""
    is_named = _ENTRY.fullmatch(folder.name) and not folder.is_symlink() and folder.is_dir()
    return bool(is_named) and folder.with_name(f"{folder.name}.lock").exists()
