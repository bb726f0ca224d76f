"""Finds the recordings of a folder of classes or of tar shards, and reads their bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wellfed import DataError
from wellfed.data.shards import Bytes, ShardIndex, ShardReader, find_shards, index_shards, read_into
from wellfed.data.shards.class_folders import (
    CLASSES,
    LISTS,
    class_of,
    files_below,
    folders,
    in_order,
    sample_key,
    splits_of,
)
from wellfed.units import counted

Ints = NDArray[np.int64]
SOUNDS = ("wav", "flac", "ogg")
"""Suffixes of recordings; the first counts if a shard's sample has several."""
LABELS = ("cls", "json", "txt")
"""Members of a shard's sample that may name its class."""
READ_AT_ONCE = 4096
"""Number of labels read at a time, since a json member may be long."""
LABEL_KEYS = ("label", "class", "cls")
"""Keys of a json member that may hold the class."""


class ClipReader(Protocol):
    """A reader of recordings by their number, for threads and processes."""

    def size(self, row: int) -> int:
        """Returns the size of a recording in bytes."""

    def place(self, row: int) -> str:
        """Returns the name of a recording, for messages."""

    def fill(self, rows: Ints, targets: Iterable[Bytes], starts: Ints | None = None) -> None:
        """Reads a part of each recording, from byte ``starts``, into an array of the wanted size."""


@dataclass
class FoundClips:
    """Recordings of a folder or of shards, N of them."""

    reader: ClipReader
    sources: list[Path]
    """Files that hold the recordings."""
    names: list[str]
    """Path of each recording without its suffix, [N]."""
    labels: list[str]
    """Class of each recording, [N]."""
    splits: list[str] | None
    """Split of each recording, one of `SPLITS`, [N]; None = unknown."""
    classes: list[str]
    bad: list[str] = field(default_factory=list)
    """Unusable recordings, with place and reason."""
    notes: list[str] = field(default_factory=list)

    @property
    def which(self) -> str:
        """A text that identifies these recordings among others of the same files."""
        names = "\n".join(self.names).encode("utf-8", "surrogateescape")
        return hashlib.blake2b(names, digest_size=8).hexdigest()


def find_clips(place: Path, cache_dir: str | Path) -> FoundClips:
    """Returns the recordings of a folder or a tar file, ordered by name.

    A folder with ``.tar`` files holds shards, any other folder holds folders of classes. Both may be divided into
    ``train/``, ``val/`` and ``test/``.

    Raises:
        DataError: there are no recordings or no labels, or a shard is damaged.
    """
    place = place.expanduser()
    name = f"workload.data.path={place}"
    if not place.exists():
        raise DataError(f"{name}: no such file or folder. path=null takes the embedded set.")
    if place.is_file() and place.suffix.lower() != ".tar":
        if _is_packed(place):
            raise DataError(f"{name} is compressed. Unpack it to a plain .tar, or to a folder, and name that.")
        raise DataError(f"{name} is neither a folder nor a .tar file. Name the folder that holds the recordings.")
    parts = {"": place} if place.is_file() else splits_of(place)
    has_shards = place.is_file() or any(
        each.is_file() for folder in parts.values() for each in folder.glob("[!.]*.tar")
    )
    found = _of_shards(place, parts, cache_dir) if has_shards else _of_folder(place, parts)
    if place.is_file():
        return found
    others = [each.name for each in folders(place) if each.name not in parts]
    if others and (has_shards or "" not in parts):
        beside = "the shards" if "" in parts else ", ".join(parts)
        found.notes.append(f"folders beside {beside} left out: {', '.join(others)}")
    if "" in parts:
        found.splits, notes = _listed(place, found.names)
        found.notes += notes
    return found


class FileReader:
    """A reader of recordings with a file each; a file is opened for each read, since a process may not hold thousands
    open."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    def size(self, row: int) -> int:
        """Returns the size as `ClipReader` describes."""
        try:
            return self.paths[row].stat().st_size
        except OSError as error:
            raise self._unreadable(row, error) from error

    def place(self, row: int) -> str:
        """Returns the name as `ClipReader` describes."""
        return str(self.paths[row])

    def fill(self, rows: Ints, targets: Iterable[Bytes], starts: Ints | None = None) -> None:
        """Reads bytes as `ClipReader` describes.

        Raises:
            DataError: a file has changed.
        """
        first = [0] * len(rows) if starts is None else starts.tolist()
        for row, into, start in zip(rows.tolist(), targets, first, strict=True):
            try:
                descriptor = os.open(self.paths[row], os.O_RDONLY)
                try:
                    count = read_into(descriptor, into, start)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise self._unreadable(row, error) from error
            if count != len(into):
                raise DataError(f"{self.paths[row]} is shorter than it was when it was looked at. Start again.")

    def _unreadable(self, row: int, error: OSError) -> DataError:
        return DataError(f"{self.paths[row]} can't be read: {error.strerror or error}. Check that it is still there.")


def _of_folder(place: Path, parts: dict[str, Path]) -> FoundClips:
    paths, names, labels, splits, notes = list[Path](), list[str](), list[str](), list[str](), list[str]()
    others: Counter[str] = Counter()
    unlabelled, hidden = 0, set[str]()
    for split, folder in parts.items():
        for path in files_below(folder):
            inside = path.relative_to(folder)
            label = class_of(inside)
            if path.suffix.lower().removeprefix(".") not in SOUNDS:
                others[path.suffix.lower() or path.name] += label is not None
            elif not path.is_file():
                others["links to nothing"] += 1
            elif label is None:
                unlabelled += 1
            elif label.startswith("_"):
                hidden.add(label)
            else:
                paths.append(path)
                names.append(inside.with_suffix("").as_posix())
                labels.append(label)
                splits.append(split)
    if not paths:
        packed = [each.name for each in sorted(place.iterdir()) if _is_packed(each)]
        hint = f" {packed[0]} is compressed: unpack it to a plain .tar." if packed else ""
        beside = f" Beside it lie {counted(unlabelled, 'recording')} in no folder of a class." if unlabelled else ""
        raise DataError(
            f"workload.data.path={place} has no recordings in folders of classes (<class>/*.wav) and no .tar "
            f"files.{beside}{hint} Put each recording into a folder that is named as its class."
        )
    if hidden:
        notes.append(f"folders left out, as their names begin with _: {', '.join(sorted(hidden))}")
    named = {class_of(Path(each.name, "_")) or "" for folder in parts.values() for each in folders(folder)}
    if empty := named - hidden - set(labels):
        notes.append(f"folders without a recording: {', '.join(sorted(empty))}")
    if unlabelled:
        notes.append(f"{counted(unlabelled, 'recording')} in no folder of a class left out")
    if left := +others:
        notes.append(f"{counted(left.total(), 'other file')} left out: {', '.join(left)}")
    return FoundClips(
        FileReader(paths), paths, names, labels, None if "" in parts else splits, in_order(labels), notes=notes
    )


def _is_packed(file: Path) -> bool:
    return ".tar." in file.name.lower() or file.suffix.lower() == ".tgz"


def _listed(place: Path, names: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """Returns the split of each clip from lists in its folder, None without lists, and notes."""
    of_key: dict[str, str] = {}
    for file, split in LISTS.items():
        if (place / file).is_file():
            lines = _text_of(place / file).splitlines()
            of_key |= {sample_key(line.strip().rpartition(".")[0]): split for line in lines if line.strip()}
    if not of_key:
        return None, []
    keys = [sample_key(name) for name in names]
    absent = len(of_key.keys() - set(keys))
    notes = [f"{counted(absent, 'clip')} of {', '.join(LISTS)} not there"] if absent else []
    return [of_key.get(key, "train") for key in keys], notes


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror or error}. Check its rights.") from error


class ShardClips:
    """A reader of recordings in tar files, with one of a few suffixes."""

    def __init__(self, index: ShardIndex, rows: Ints, parts: Ints) -> None:
        self.index = index
        self._row_N, self._part_N = rows, parts
        self._readers = {part: ShardReader(index, SOUNDS[part]) for part in np.unique(parts).tolist()}

    def size(self, row: int) -> int:
        """Returns the size as `ClipReader` describes."""
        return int(self._readers[int(self._part_N[row])].sizes(self._row_N[row : row + 1])[0])

    def place(self, row: int) -> str:
        """Returns the name as `ClipReader` describes."""
        at = int(self._row_N[row])
        return f"{self.index.paths[int(self.index.shards[at])]}: {self.index.keys[at]}.{SOUNDS[int(self._part_N[row])]}"

    def fill(self, rows: Ints, targets: Iterable[Bytes], starts: Ints | None = None) -> None:
        """Reads bytes as `ClipReader` describes.

        Raises:
            DataError: a shard has changed.
        """
        if len(self._readers) == 1:
            next(iter(self._readers.values())).fill(self._row_N[rows], targets, starts)
            return
        part_B, into = self._part_N[rows], list(targets)
        for part, reader in self._readers.items():
            mine = np.flatnonzero(part_B == part)
            pieces = None if starts is None else starts[mine]
            reader.fill(self._row_N[rows[mine]], [into[each] for each in mine], pieces)


def _of_shards(place: Path, parts: dict[str, Path], cache_dir: str | Path) -> FoundClips:
    paths, split_of, known_of = list[Path](), list[str](), _names_of_classes(place, parts)
    for split, folder in parts.items():
        found = find_shards(folder)
        paths += found
        split_of += [split] * len(found)
    index = index_shards(paths, [*SOUNDS, *LABELS], cache_dir)
    has_SN = np.stack([index.parts[part][1] >= 0 for part in SOUNDS])
    sound_N = np.where(has_SN.any(0), has_SN.argmax(0), -1)
    texts, bad = _label_texts(index, sound_N)
    rows, labels = list[int](), list[str]()
    for row, (text, shard) in enumerate(zip(texts, index.shards.tolist(), strict=True)):
        if text is None:
            continue
        known = known_of[split_of[shard]]
        label = _name(text, known)
        if label is None:
            bad.append(f"{_sample(index, row)}: its class is {text}, and {CLASSES} has {len(known)}")
        else:
            rows.append(row)
            labels.append(label)
    if not rows:
        raise _without_labels(place, index, sound_N, bad)
    row_N = np.array(rows, np.int64)
    reader = ShardClips(index, row_N, sound_N[row_N])
    splits = None if "" in parts else [split_of[shard] for shard in index.shards[row_N].tolist()]
    names = [index.keys[row] for row in rows]
    named = list(dict.fromkeys(name for known in known_of.values() for name in known))
    notes = list[str]()
    beside = sorted({folder for folder in parts.values() if folder.is_dir()})
    if packed := [str(each) for folder in beside for each in sorted(folder.iterdir()) if _is_packed(each)]:
        notes.append(f"compressed, and left out: {', '.join(packed[:3])}{' and more' if len(packed) > 3 else ''}")
    return FoundClips(reader, paths, names, labels, splits, named or in_order(labels), bad, notes)


def _name(text: str, known: Sequence[str]) -> str | None:
    """Returns the class of a label, given by number or name; None if it is unknown."""
    if not known:
        return text
    if text.isdecimal():
        return known[int(text)] if int(text) < len(known) else None
    return text if text in known else None


def _sample(index: ShardIndex, row: int) -> str:
    return f"{index.paths[int(index.shards[row])]}: {index.keys[row]}"


def _label_texts(index: ShardIndex, sound_N: Ints) -> tuple[list[str | None], list[str]]:
    """Returns the label of each sample with sound, and the faults of others."""
    texts: list[str | None] = [None] * len(index)
    lacking = sound_N < 0
    bad = [f"{_sample(index, row)}: no sound ({', '.join(SOUNDS)})" for row in np.flatnonzero(lacking).tolist()]
    done_N = lacking.copy()
    unread: dict[int, str] = {}
    """Sample -> member without a readable class."""
    for part in LABELS:
        rows = np.flatnonzero(~done_N & (index.parts[part][1] >= 0))
        if len(rows):
            reader = ShardReader(index, part)
            for some in np.array_split(rows, -(-len(rows) // READ_AT_ONCE)):
                for row, content in zip(some.tolist(), reader.read(some), strict=True):
                    texts[row] = _label(part, bytes(content)) or None
                    if texts[row] is None:  # another member may hold the label
                        unread.setdefault(row, part)
                    else:
                        done_N[row] = True
    for row in np.flatnonzero(~done_N).tolist():
        if row in unread:
            bad.append(f"{_sample(index, row)}.{unread[row]}: no class can be read from it")
        else:
            bad.append(f"{_sample(index, row)}: no label ({', '.join(LABELS)})")
    return texts, bad


def _label(part: str, content: bytes) -> str:
    """Returns the name or number of a class; empty = none."""
    text = content.decode("utf-8", "replace").strip()
    if part == "json":
        try:
            found = json.loads(text)
        except ValueError:
            return ""
        if isinstance(found, dict):
            found = next((found[key] for key in LABEL_KEYS if key in found), None)
        if isinstance(found, bool) or not isinstance(found, str | int):
            return ""
        text = str(found).strip()
    return text if len(text) <= 200 and "\n" not in text and "\ufffd" not in text else ""


def _names_of_classes(place: Path, parts: dict[str, Path]) -> dict[str, list[str]]:
    """Returns the names in ``classes.json`` for each split's shards, or for all; empty without the file."""
    whole = place if place.is_dir() else place.parent
    of_all = _class_names(whole / CLASSES) or _class_names(parts.get("train", whole) / CLASSES)
    found = {split: _class_names(folder / CLASSES) or of_all for split, folder in parts.items()}
    without = [split for split, names in found.items() if not names]
    if without and len(without) < len(found):
        one = next(folder / CLASSES for split, folder in parts.items() if found[split])
        raise DataError(
            f"{one} names the classes of its shards, and beside those of {' and '.join(without)} there is no "
            f"{CLASSES}. Put one there, too: into {whole}, where it is that of all."
        )
    return found


def _class_names(file: Path) -> list[str]:
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} can't be read ({error}). Make the shards again, or remove it.") from error
    if not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
        raise DataError(f"{file} is no list of names. Make the shards again, or remove it.")
    return found


def _without_labels(place: Path, index: ShardIndex, sound_N: Ints, bad: Sequence[str]) -> DataError:
    if (sound_N < 0).all():
        problem = f"no sample has sound ({', '.join(SOUNDS)})"
    else:
        problem = f"no sample has a label ({', '.join(LABELS)} right beside the sound in the tar file)"
    first = f" The first: {bad[0]}." if bad else ""
    return DataError(
        f"{index.paths[0]}: {problem}, of {counted(len(index), 'sample')} in workload.data.path={place}.{first} "
        "Make the shards with `python -m wellfed shards FOLDER --out DIR`, which writes .cls files."
    )
