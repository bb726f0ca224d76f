"""Packs a folder of files, one folder per class, into tar shards of webdataset's layout."""

from __future__ import annotations

import errno
import glob
import io
import json
import random
import secrets
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wellfed.data.shards.class_folders import (
    CLASSES,
    LISTS,
    SPLITS,
    class_of,
    files_below,
    folders,
    in_order,
    sample_key,
    splits_of,
)
from wellfed.errors import ConfigError, DataError
from wellfed.units import counted

USUAL_NUM = 16


@dataclass(frozen=True)
class Written:
    """The result of packing."""

    shards: tuple[Path, ...]
    classes: tuple[str, ...]
    num_samples: int
    num_bytes: int
    skipped: tuple[str, ...]
    """Files and folders that were left out, with the reasons."""
    remains: tuple[Path, ...]
    """Folders left next to the new one by killed packings."""


def write_shards(
    source: Path,
    out: Path,
    *,
    num: int | None = None,
    suffixes: Sequence[str] = (".wav",),
    seed: int = 0,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Packs ``source/<class>/**/*.wav`` into ``num`` files ``out/0000.tar``, ..., in an order drawn by ``seed``.

    A sample holds the file's bytes under its suffix, and the number of its class under ``cls``. Dots and blanks in its
    path become ``_``, since a dot ends a key. The shards differ by at most one sample and mix all classes. Folders
    ``train``, ``val`` and ``test`` in ``source`` become folders of shards with the same class numbers. An interrupted
    packing leaves no shards.

    Args:
        num: shards per split; None = 16. At most one shard per file.
        on_file: called with the number of files packed and the total.

    Raises:
        DataError: no file matches, or one can't be read.
        ConfigError: ``out`` is not empty, or ``num`` is out of range.
    """
    if num is not None and num < 1:
        raise ConfigError.of(f"--num {num}", "is no number of shards.", f"Write --num {USUAL_NUM}.")
    if out.exists() and not _is_empty(out):
        problem = "is not empty, and shards of two packings would be read as one set."
        raise ConfigError.of(f"--out {out}", problem, "Name a new folder, or clear this one yourself.")
    files_of, skipped = _files(source, suffixes)
    most = max(map(len, files_of.values()))
    if num is not None and num > most:
        problem = f"are more than the {counted(most, 'file')} in {source}."
        raise ConfigError.of(f"--num {num}", problem, f"Write --num {min(most, USUAL_NUM)}.")
    classes = tuple(in_order(name for files in files_of.values() for name, _ in files))
    number_of = {name: number for number, name in enumerate(classes)}
    out = out.resolve()
    remains = tuple(sorted(out.parent.glob(f"{glob.escape(out.name)}.part-*")))
    partial = out.with_name(f"{out.name}.part-{secrets.token_hex(4)}")
    done, total, num_bytes = 0, sum(map(len, files_of.values())), 0
    try:
        partial.mkdir(parents=True)
        for split, files in files_of.items():
            (partial / split).mkdir(exist_ok=True)
            for path, samples in _shares(files, source / split, partial / split, num or USUAL_NUM, seed):
                for size in _packed(path, samples, number_of):
                    done, num_bytes = done + 1, num_bytes + size
                    on_file(done, total)
        (partial / CLASSES).write_text(json.dumps(classes, indent=1) + "\n", encoding="utf-8")
        for list_of_a_split in LISTS:
            if (source / list_of_a_split).is_file():
                shutil.copyfile(source / list_of_a_split, partial / list_of_a_split)
        with suppress(OSError):  # not empty any more: then the next line fails
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            problem = "was filled by another process meanwhile."
            raise ConfigError.of(f"--out {out}", problem, "Name a new folder, if that is not what you want.") from error
        raise DataError(
            f"{out} can't be written: {error.strerror or error}. Free space, or name another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Written(tuple(sorted(out.rglob("*.tar"))), classes, total, num_bytes, tuple(skipped), remains)


def _shares(
    files: Sequence[tuple[str, Path]], source: Path, out: Path, num: int, seed: int
) -> Iterator[tuple[Path, list[tuple[str, str, Path]]]]:
    """Yields the path of each shard, with key, class and file of its samples."""
    order = sorted(files, key=lambda file: str(file[1]))
    random.Random(seed).shuffle(order)
    keys = _keys(source, [path for _, path in order])
    samples = [(key, name, file) for key, (name, file) in zip(keys, order, strict=True)]
    num = min(num, len(samples))
    for number in range(num):
        yield out / f"{number:0{max(4, len(str(num - 1)))}}.tar", samples[number::num]


def _packed(path: Path, samples: Sequence[tuple[str, str, Path]], number_of: Mapping[str, int]) -> Iterator[int]:
    """Writes a shard, and yields the size of each packed file."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as shard:
        for key, name, file in samples:
            content = _content(file)
            _add(shard, f"{key}{file.suffix.lower()}", content)
            _add(shard, f"{key}.cls", str(number_of[name]).encode())
            yield len(content)


def _files(source: Path, suffixes: Sequence[str]) -> tuple[dict[str, list[tuple[str, Path]]], list[str]]:
    """Returns class and path of each file by split, and the files that are left out."""
    if not source.is_dir():
        problem = "is no folder" if source.exists() else "does not exist"
        raise DataError(f"{source} {problem}. Name the folder that holds a folder for each class.")
    wanted = " or ".join(suffixes)
    found: dict[str, list[tuple[str, Path]]] = {}
    skipped = []
    splits = splits_of(source)
    if "" not in splits:
        skipped = [f"{each}: beside train/, and no split" for each in folders(source) if each.name not in SPLITS]
    for split, folder in splits.items():
        for path in files_below(folder):
            name = class_of(path.relative_to(folder))
            if reason := _why_skipped(path, name, suffixes, wanted):
                skipped.append(f"{path}: {reason}")
            elif name is not None and path.suffix.lower() in suffixes:
                found.setdefault(split, []).append((name, path))
        packed = {path.relative_to(folder).parts[0] for _, path in found.get(split, [])}
        empty = [each for each in folders(folder) if each.name not in packed and not each.name.startswith("_")]
        skipped += [f"{each}: no {wanted} in it" for each in empty]
    if not found:
        first = f"; the first of {counted(len(skipped), 'other file')} is {skipped[0]}" if skipped else ""
        raise DataError(f"{source} has no {wanted.replace('.', '*.')} in folders of classes (<class>/...){first}.")
    return found, skipped


def _why_skipped(path: Path, name: str | None, suffixes: Sequence[str], wanted: str) -> str:
    """Returns why a file of a class is not packed; empty if it is packed, or lists a split."""
    if path.suffix.lower() not in suffixes:
        return "" if path.name in LISTS else f"not {wanted}"
    if name is None:
        return "in no folder of a class"
    if name.startswith("_"):
        return "its folder's name begins with _"
    if not path.is_file():
        return "no file, or a link to none"
    return "" if path.stat().st_size else "empty"


def _keys(source: Path, paths: Sequence[Path]) -> list[str]:
    keys, taken = [], set()
    for path in paths:
        key = start = sample_key(path.relative_to(source).with_suffix("").as_posix())
        number = 1
        while key in taken:
            number += 1
            key = f"{start}-{number}"
        taken.add(key)
        keys.append(key)
    return keys


def _is_empty(out: Path) -> bool:
    try:
        return out.is_dir() and not any(out.iterdir())
    except OSError as error:
        raise DataError(f"{out} can't be read: {error.strerror or error}. Check its rights.") from error


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror or error}. Check its rights.") from error


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
