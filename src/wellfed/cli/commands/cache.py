"""Lists and clears the entries of paths.cache_dir (``python -m wellfed cache list|clear``)."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import filterfalse, groupby
from pathlib import Path
from typing import Any

from wellfed.cli.output import Answer
from wellfed.command_line import command
from wellfed.config.schema import PathsConfig
from wellfed.data.prepared import DIGEST, MANIFEST, nobody_uses, read_manifest, remove
from wellfed.errors import EXIT_FAILED, EXIT_OK, ConfigError
from wellfed.explain.report.text_table import print_text
from wellfed.units import counted, show_bytes, show_duration, show_line

FOOTPRINT = "footprint.json"
"""File of a cached footprint. Repeated here because `wellfed.plan.predict.cache` imports torch."""
_SHOWN = 10
"""Maximum number of entries shown per kind, unless the kind is named."""
_DAY_S = 24 * 3600


@dataclass(frozen=True)
class CacheEntry:
    """A folder of the cache."""

    kind: str
    name: str
    bytes: int
    age_s: float
    made_of: str
    in_use: bool
    """Whether a living process uses or builds the entry."""


def main(argv: Sequence[str]) -> int:
    """Prints the entries, or removes those not in use."""
    parser = argparse.ArgumentParser(
        prog=command("cache"),
        description="What is kept under paths.cache_dir, so that it is made once: data that workloads have prepared, "
        "predictions of memory (footprints). All of it is made again when it is needed.",
    )
    parser.add_argument("what", choices=("list", "clear"), help="show all entries, or remove those that are not in use")
    parser.add_argument("kind", nargs="?", metavar="KIND", help="only this kind")
    default = PathsConfig.cache_dir
    parser.add_argument("--cache-dir", default=default, metavar="DIR", help=f"where it lies (default: {default})")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    asked = parser.parse_args(argv)
    home = Path(asked.cache_dir).expanduser()
    found = _asked_for(home, asked.kind)
    terminal = Answer()
    if asked.what == "clear":
        return _clear(terminal, home, found, as_json=asked.json)
    if asked.json:
        terminal.show_json([asdict(entry) for entry in found])
    else:
        for line in _lines(home, found, all_of_them=asked.kind is not None):
            print_text(terminal, line)
    return EXIT_OK


def _asked_for(home: Path, kind: str | None) -> list[CacheEntry]:
    way_out = "Name the folder of paths.cache_dir: --cache-dir DIR."
    try:
        found = entries(home)
        others = [] if found or not home.exists() else sorted(filterfalse(_is_empty_kind, home.iterdir()))
    except OSError as error:
        raise ConfigError.of(str(home), f"can't be read ({error.strerror or error}).", way_out) from error
    if others:
        names = ", ".join(path.name for path in others[:5])
        problem = f"is no cache of wellfed; it holds {names}{', ...' if len(others) > 5 else ''}."
        raise ConfigError.of(str(home), problem, way_out)
    kinds = sorted({entry.kind for entry in found})
    if kind is not None and kind not in kinds:
        there = f"There are: {', '.join(kinds)}." if kinds else "Nothing is kept there."
        raise ConfigError.of(kind, f"is no kind of what {home} holds.", there)
    return [entry for entry in found if kind in (None, entry.kind)]


def entries(home: Path) -> list[CacheEntry]:
    """Returns all entries by kind, the largest first; other files are ignored."""
    if not home.exists():
        return []
    folders = [folder for kind in home.iterdir() if kind.is_dir() for folder in kind.iterdir() if _is_entry(folder)]
    return sorted(map(_entry, folders), key=lambda entry: (entry.kind, -entry.bytes, entry.name))


def _is_entry(folder: Path) -> bool:
    """Returns whether a folder is an entry, also a damaged or half-built one. A digest as name is not enough."""
    digest, _, rest = folder.name.partition(".")
    if DIGEST.fullmatch(digest) is None or not folder.is_dir() or folder.is_symlink():
        return False
    is_named = folder.with_name(f"{digest}.lock").exists() and (not rest or "-" in rest)
    return is_named or (not rest and any((folder / name).is_file() for name in (FOOTPRINT, MANIFEST)))


def _is_empty_kind(folder: Path) -> bool:
    """Returns whether a folder is empty but for locks."""
    locks = (path.suffix == ".lock" and DIGEST.fullmatch(path.stem) for path in folder.glob("*"))
    return folder.is_dir() and all(locks)


def _entry(folder: Path) -> CacheEntry:
    in_use, made_of = False, "a model under a training"
    if not (folder / FOOTPRINT).is_file():
        made_of = _made_of(folder)
        with contextlib.suppress(OSError), nobody_uses(folder.with_name(folder.name[:16])) as is_free:
            in_use = not is_free
    size, changed_at = 0, 0.0
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # removed meanwhile
            seen = path.stat()
            size, changed_at = size + (seen.st_size if path.is_file() else 0), max(changed_at, seen.st_mtime)
    return CacheEntry(folder.parent.name, folder.name, size, max(0.0, time.time() - changed_at), made_of, in_use)


def _made_of(folder: Path) -> str:
    if "." in folder.name:
        return "half built"
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError):
        return "damaged"
    settings = ", ".join(f"{name}={_value(value)}" for name, value in manifest.get("settings", {}).items())
    number = manifest.get("num_sources", 0)
    first = f"{manifest.get('first_source')}{f' and {number - 1} more' if number > 1 else ''}" if number else ""
    return "; ".join(part for part in (first, settings) if part)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _lines(home: Path, found: Sequence[CacheEntry], *, all_of_them: bool) -> Iterator[str]:
    if not found:
        yield f"{home}: nothing is kept there."
    for kind, group in groupby(found, key=lambda entry: entry.kind):
        of_kind = [*group]
        yield f"{show_line(kind)}: {_sum(of_kind)}"
        shown = of_kind if all_of_them else of_kind[:_SHOWN]
        for entry in shown:
            made_of = f"{entry.made_of} (in use)" if entry.in_use else entry.made_of
            days, age_s = int(entry.age_s / _DAY_S), max(1.0, float(int(entry.age_s)))
            age = counted(days, "day") if days >= 2 else show_duration(age_s)
            yield f"  {entry.name:<16}  {show_bytes(entry.bytes):>10}  {age:>12}  {show_line(made_of)}"
        if len(shown) < len(of_kind):
            yield f"  and {len(of_kind) - len(shown)} smaller ones: {command('cache')} list {show_line(kind)}"


def _sum(found: Sequence[CacheEntry]) -> str:
    number = "1 entry" if len(found) == 1 else f"{len(found)} entries"
    return f"{number}, {show_bytes(sum(entry.bytes for entry in found))}"


def _clear(terminal: Answer, home: Path, found: Sequence[CacheEntry], *, as_json: bool) -> int:
    removed, kept = list[CacheEntry](), list[tuple[CacheEntry, str]]()
    for entry in found:
        try:
            is_gone, why = remove(home / entry.kind / entry.name), "is in use"
        except OSError as error:
            is_gone, why = False, f"can't be removed ({error.strerror or error})"
        if is_gone:
            removed.append(entry)
        else:
            kept.append((entry, why))
        with contextlib.suppress(OSError):  # other entries are left
            (home / entry.kind).rmdir()
    if as_json:
        stays = [{**asdict(entry), "why": why} for entry, why in kept]
        terminal.show_json({"removed": [asdict(entry) for entry in removed], "kept": stays})
    else:
        lines = [f"removed from {home}: {_sum(removed)}" if removed else f"{home}: nothing was removed."]
        lines += [f"{home / entry.kind / entry.name} stays: it {why}" for entry, why in kept]
        for line in lines:
            print_text(terminal, line)
    return EXIT_FAILED if any(why != "is in use" for _, why in kept) else EXIT_OK
