"""Packs a folder of files, one folder a class, into tar shards of webdataset's layout."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wellfed.errors import ConfigError, DataError
from wellfed.units import counted

USUAL_NUM = 16
CLASSES = "classes.json"
"""Beside the shards: the names of the classes, in the order of their numbers."""
_NOT_IN_A_KEY = re.compile(r"[.\\\s]+")


@dataclass(frozen=True)
class Written:
    """What was packed."""

    shards: tuple[Path, ...]
    classes: tuple[str, ...]
    num_samples: int
    num_bytes: int
    skipped: tuple[str, ...]
    """Files that were left out, with the reason."""


def write_shards(
    source: Path,
    out: Path,
    *,
    num: int | None = None,
    suffixes: Sequence[str] = (".wav",),
    seed: int = 0,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Pack ``source/<class>/**/*.wav`` into ``num`` files ``out/0000.tar`` and on, in an order drawn by ``seed``.

    A sample is the file's bytes as they are, under its suffix, and its class's number under ``cls``; dots and blanks
    of its path become ``_``, since a key ends at its first dot. The shards hold equally many samples, one more at most,
    of all classes mixed. An interrupted packing leaves none.

    Args:
        num: None = 16, or one for each file where there are fewer.
        on_file: called with the number of files packed, and of all.

    Raises:
        DataError: no such files, or one that can't be read.
        ConfigError: ``out`` holds shards already, or ``num`` is out of range.
    """
    if num is not None and num < 1:
        raise ConfigError.of(f"--num {num}", "is no number of shards.", f"Write --num {USUAL_NUM}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problem = "is not empty, and shards of two packings would be read as one set."
        raise ConfigError.of(f"--out {out}", problem, "Name a new folder, or clear this one yourself.")
    files, skipped = _files(source, suffixes)
    num = num or min(USUAL_NUM, len(files))
    if num > len(files):
        problem = f"are more than the {counted(len(files), 'file')} in {source}."
        raise ConfigError.of(f"--num {num}", problem, f"Write --num {min(len(files), USUAL_NUM)}.")
    classes = tuple(sorted({name for name, _ in files}))
    order = sorted(files, key=lambda file: str(file[1]))
    random.Random(seed).shuffle(order)
    keys = _keys(source, [path for _, path in order])
    partial = out.with_name(f"{out.name}.part-{os.getpid()}")
    written = 0
    try:
        partial.mkdir(parents=True)
        done = 0
        for number in range(num):
            path = partial / f"{number:0{max(4, len(str(num - 1)))}}.tar"
            with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as shard:
                for place in range(number, len(order), num):
                    name, file = order[place]
                    content = _content(file)
                    written += len(content)
                    _add(shard, f"{keys[place]}{file.suffix.lower()}", content)
                    _add(shard, f"{keys[place]}.cls", str(classes.index(name)).encode())
                    done += 1
                    on_file(done, len(order))
        (partial / CLASSES).write_text(json.dumps(classes, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise DataError(
            f"{out} can't be written: {error.strerror or error}. Free space, or name another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Written(tuple(sorted(out.glob("*.tar"))), classes, len(order), written, tuple(skipped))


def _files(source: Path, suffixes: Sequence[str]) -> tuple[list[tuple[str, Path]], list[str]]:
    """Class and path of each file, and what is left out."""
    if not source.is_dir():
        problem = "is no folder" if source.exists() else "does not exist"
        raise DataError(f"{source} {problem}. Name the folder that holds a folder for each class.")
    files, skipped = [], []
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        if not path.is_file() or any(part.startswith(".") for part in inside.parts):
            continue
        if path.suffix.lower() not in suffixes:
            skipped.append(f"{path}: not {' or '.join(suffixes)}")
        elif len(inside.parts) < 2:
            skipped.append(f"{path}: in no folder of a class")
        elif not path.stat().st_size:
            skipped.append(f"{path}: empty")
        else:
            files.append((inside.parts[0], path))
    if not files:
        wanted = " or ".join(f"*{suffix}" for suffix in suffixes)
        found = f"; the first of {counted(len(skipped), 'other file')} is {skipped[0]}" if skipped else ""
        raise DataError(f"{source} has no {wanted} in folders of classes (<class>/...){found}.")
    return files, skipped


def _keys(source: Path, paths: Sequence[Path]) -> list[str]:
    """Paths without their suffix, each only once; dots would end a key."""
    keys, taken = [], set()
    for path in paths:
        key = start = _NOT_IN_A_KEY.sub("_", path.relative_to(source).with_suffix("").as_posix())
        number = 1
        while key in taken:
            number += 1
            key = f"{start}-{number}"
        taken.add(key)
        keys.append(key)
    return keys


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror or error}. Check its rights.") from error


def _add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
