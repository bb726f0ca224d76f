"""Finds the samples in tar shards of webdataset's layout, so that they can be read in any order.

Successive members with equal paths up to the first dot of the file's name are one sample. ``class/clip_17.wav`` and
``class/clip_17.cls`` are the sample ``class/clip_17`` with the parts ``wav`` and ``cls``
(https://github.com/webdataset/webdataset).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wellfed.command_line import command
from wellfed.data.prepared import prepared
from wellfed.data.shards.tar_members import members
from wellfed.errors import DataError
from wellfed.units import counted

Ints = NDArray[np.int64]
KIND = "shards"
_MAKING = 5
"""Version of the index format."""


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
    num_dotted: int = 0
    """Members that end like a part but are not one, such as ``a.2.wav``: a key ends at the first dot."""

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
    places: dict[str, list[tuple[Ints, Ints]]] = {part: [] for part in parts}
    stamps, num_dotted = [], 0
    for number, path in enumerate(paths):
        stamps.append(stamp(_seen(path)))
        found = _of_shard(path, cache_dir)
        places_of = {part: found.places_of(part) for part in parts}
        has_any_N = np.zeros(len(found.keys), bool)
        for _, size_N in places_of.values():
            has_any_N |= size_N >= 0
        rows = np.flatnonzero(has_any_N)
        num_dotted += found.num_dotted(parts)
        keys += [found.keys[row] for row in rows]
        shards.append(np.full(len(rows), number, np.int64))
        for part, (offset_N, size_N) in places_of.items():
            places[part].append((offset_N[rows], size_N[rows]))
    if not keys:
        ends = " or ".join(f".{part}" for part in parts)
        problem = f"no member of {counted(len(paths), 'shard')} ends in {ends} (from the first dot of its name on)"
        raise DataError(f"{paths[0]}: {problem}. Check what the shards hold: tar tf {paths[0]} | head")
    return ShardIndex(
        tuple(paths),
        tuple(stamps),
        tuple(keys),
        np.concatenate(shards),
        {part: _joined(pieces) for part, pieces in places.items()},
        num_dotted,
    )


def stamp(seen: os.stat_result) -> tuple[int, int]:
    """Returns the size and time of change of a file."""
    return seen.st_size, seen.st_mtime_ns


def _seen(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}. Check its rights.") from error


def _joined(pieces: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    offsets, sizes = zip(*pieces, strict=True)
    return np.concatenate(offsets), np.concatenate(sizes)


# -- one shard ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shard:
    """The samples of one file with M members."""

    keys: list[str]
    parts: list[str]
    """Distinct parts; names with further dots may each have their own part."""
    table: Ints
    """[M, 4]: index in ``keys``, index in ``parts``, offset, size."""

    def num_dotted(self, parts: Sequence[str]) -> int:
        """Returns the number of members whose part ends in ``.<part>`` for one of ``parts``."""
        dotted = [number for number, part in enumerate(self.parts) if "." in part and part.rpartition(".")[2] in parts]
        return int(np.isin(self.table[:, 1], dotted).sum())

    def places_of(self, part: str) -> tuple[Ints, Ints]:
        """Returns offset and size of a part for each key; size -1 = the sample lacks it."""
        offset_N, size_N = np.full(len(self.keys), -1, np.int64), np.full(len(self.keys), -1, np.int64)
        if part in self.parts:
            mine = self.table[self.table[:, 1] == self.parts.index(part)]
            offset_N[mine[:, 0]], size_N[mine[:, 0]] = mine[:, 2], mine[:, 3]
        return offset_N, size_N


def _of_shard(path: Path, cache_dir: str | Path) -> _Shard:
    folder = prepared(cache_dir, KIND, [path], {"making": _MAKING}, lambda folder: _store(_read(path), folder))
    texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    return _Shard(texts["keys"], texts["parts"], np.load(folder / "members.npy"))


def _store(shard: _Shard, folder: Path) -> None:
    texts = {"keys": shard.keys, "parts": shard.parts}
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")  # ASCII, so that any name can be written
    np.save(folder / "members.npy", shard.table)


def _read(path: Path) -> _Shard:
    keys: list[str] = []
    parts: dict[str, int] = {}
    found: list[tuple[int, int, int, int]] = []
    there: set[str] = set()
    for member in members(path):
        split = split_name(member.name)
        if split is None:  # belongs to no sample: hidden files, README
            continue
        key, part = split
        if not keys or key != keys[-1]:
            keys.append(key)
            there.clear()
        if part in there:
            raise DataError(f"{path}: {member.name!r} comes twice in one sample. Make the shard again.")
        there.add(part)
        found.append((len(keys) - 1, parts.setdefault(part, len(parts)), member.offset, member.size))
    return _Shard(keys, list(parts), np.array(found, np.int64).reshape(-1, 4))


def split_name(name: str) -> tuple[str, str] | None:
    """Returns key and lower-case part: ``a/b`` and ``seg.png`` for ``a/b.seg.png``; None if one is missing."""
    folder, slash, file = name.removeprefix("./").rpartition("/")
    stem, dot, part = file.partition(".")
    if not stem or not dot or not part:
        return None
    return f"{folder}{slash}{stem}", part.lower()
