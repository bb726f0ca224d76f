"""Finds the samples in tar shards of webdataset's layout, so that they can be read in any order.

Successive members with equal paths up to the first dot of the file's name are one sample. ``class/clip_17.wav`` and
``class/clip_17.cls`` are the sample ``class/clip_17`` with the parts ``wav`` and ``cls``
(https://github.com/webdataset/webdataset).
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wellfed.command_line import command
from wellfed.data.prepared import prepared
from wellfed.errors import DataError

Ints = NDArray[np.int64]
KIND = "shards"
_MAKING = 5
"""Version of the index format."""
_REST = 2**20
"""Bytes looked at behind the last member. tar writes some KiB of zeros."""


@dataclass(frozen=True)
class ShardIndex:
    """Offsets of the N samples of some shards, in the order of the shards and within them."""

    paths: tuple[Path, ...]
    stamps: tuple[tuple[int, int], ...]
    """`stamp` of each file, which changes with the file."""
    keys: tuple[str, ...]
    """[N]; a repeated key, also in another shard, is another sample."""
    shards: Ints
    """Index of each sample's shard in ``paths``, [N]."""
    parts: Mapping[str, tuple[Ints, Ints]]
    """Offset and size in bytes of each part, [N] each; size -1 = the sample lacks the part."""

    def __len__(self) -> int:
        return len(self.keys)


def find_shards(place: Path) -> list[Path]:
    """Returns the ``.tar`` files of a folder, or the file itself, sorted by name, without hidden files.

    Raises:
        DataError: there is no such file.
    """
    found = [place] if place.is_file() else sorted(path for path in place.glob("[!.]*.tar") if path.is_file())
    if not found:
        problem = "has no .tar files" if place.is_dir() else "is neither a folder nor a file"
        raise DataError(f"{place} {problem}. Make shards with `{command('shards')} FOLDER --out {place}`.")
    return found


def index_shards(paths: Sequence[Path], parts: Sequence[str], cache_dir: str | Path) -> ShardIndex:
    """Returns the samples that have at least one of ``parts``; caches each shard's index under ``cache_dir``.

    Raises:
        DataError: a file is no tar file, or is damaged; there are no samples.
    """
    keys: list[str] = []
    shards: list[Ints] = []
    tables: list[Ints] = []
    stamps = []
    for number, path in enumerate(paths):
        keys_of_shard, table_N = _of_shard(path, parts, cache_dir)
        stamps.append(stamp(path.stat()))
        rows = np.flatnonzero((table_N[:, :, 1] >= 0).any(axis=1))
        keys += [keys_of_shard[row] for row in rows]
        shards.append(np.full(len(rows), number, np.int64))
        tables.append(table_N[rows])
    if not keys:
        problem = f"no member ends in {' or '.join(f'.{part}' for part in parts)} (from the first dot of its name on)"
        raise DataError(f"{paths[0]}: {problem}. Check what the shards hold: tar tf {paths[0]} | head")
    table_N = np.concatenate(tables)
    places = {part: (table_N[:, column, 0].copy(), table_N[:, column, 1].copy()) for column, part in enumerate(parts)}
    return ShardIndex(tuple(paths), tuple(stamps), tuple(keys), np.concatenate(shards), places)


def stamp(seen: os.stat_result) -> tuple[int, int]:
    """Returns the size and time of change of a file."""
    return seen.st_size, seen.st_mtime_ns


def _of_shard(path: Path, parts: Sequence[str], cache_dir: str | Path) -> tuple[list[str], Ints]:
    """Returns the keys of a file, and offset and size of each part, ``[N, parts, 2]``; size -1 = lacking."""
    folder = prepared(cache_dir, KIND, [path], {"making": _MAKING}, lambda folder: _store_members(path, folder))
    texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    members = np.load(folder / "members.npy")
    table_N = np.full((len(texts["keys"]), len(parts), 2), -1, np.int64)
    for column, part in enumerate(parts):
        if part in texts["parts"]:
            mine = members[members[:, 1] == texts["parts"].index(part)]
            table_N[mine[:, 0], column] = mine[:, 2:]
    return texts["keys"], table_N


def _store_members(path: Path, folder: Path) -> None:
    """Writes the index of a tar file: keys and parts by name, and for each member key, part, offset and size."""
    keys: list[str] = []
    parts: dict[str, int] = {}
    found: list[tuple[int, int, int, int]] = []
    for member in tar_members(path):
        if (split := split_name(member.name)) is None:  # belongs to no sample: hidden files, README
            continue
        key, part = split
        if not keys or key != keys[-1]:
            keys.append(key)
        found.append((len(keys) - 1, parts.setdefault(part, len(parts)), member.offset_data, member.size))
    if len({each[:2] for each in found}) < len(found):
        raise DataError(f"{path}: a sample has two members of one suffix. Make the shard again.")
    # ASCII, so that any name can be written
    (folder / "texts.json").write_text(json.dumps({"keys": keys, "parts": list(parts)}), encoding="utf-8")
    np.save(folder / "members.npy", np.array(found, np.int64).reshape(-1, 4))


def split_name(name: str) -> tuple[str, str] | None:
    """Returns key and lower-case part: ``a/b`` and ``seg.png`` for ``a/b.seg.png``; None if one is missing."""
    folder, slash, file = name.removeprefix("./").rpartition("/")
    stem, _, part = file.partition(".")
    return (f"{folder}{slash}{stem}", part.lower()) if stem and part else None


def tar_members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Yields all files of a tar file in order; ``offset_data`` is the offset of a file's first byte.

    Raises:
        DataError: the file can't be read, is not a plain tar file, is damaged or cut off, or holds links.
    """
    try:
        with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape") as archive:
            for info in archive:
                if not info.isdir() and (not info.isreg() or info.issparse()):
                    problem = f"holds {info.name}, which is a link, sparse or no file"
                    raise DataError(f"{path} {problem}. Pack it again with plain files: tar --hard-dereference.")
                if not info.isdir():
                    yield info
            end = archive.offset
        with path.open("rb") as file:  # tarfile ends at a damaged header without an error
            file.seek(end)
            rest = file.read(_REST)
    except tarfile.TarError as error:
        problem = f"can't be read as a tar file ({error}): it is damaged, cut off, empty or compressed"
        raise DataError(f"{path} {problem}. Make it again, unpack it to a plain .tar, or take it out.") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}. Check its rights.") from error
    if not rest or any(rest):
        problem = f"is damaged or cut off behind byte {end}, or another archive follows: zeros must close it"
        raise DataError(f"{path} {problem}. Make it again.")
