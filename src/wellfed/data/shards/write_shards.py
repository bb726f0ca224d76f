"""Packs a folder of many small files into a few tar shards with labels (``python -m wellfed shards``)."""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from wellfed.data.shards.class_folders import CLASSES, LISTS, class_of, files_below, in_order, sample_key, splits_of
from wellfed.errors import ConfigError, DataError

USUAL_NUM = 16


@dataclass(frozen=True)
class Written:
    """The result of packing."""

    shards: tuple[Path, ...]
    classes: tuple[str, ...]
    num_samples: int
    num_bytes: int


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
        num: shards per split, >= 1; None = 16. At most one shard per file.
        on_file: called with the number of files packed and the total.

    Raises:
        DataError: no file matches, or one can't be read.
        ConfigError: ``out`` is not empty, or ``num`` is below 1.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problem = "is not empty, and shards of two packings would be read as one set."
        raise ConfigError.of(f"--out {out}", problem, "Name a new folder, or clear this one yourself.")
    if num is not None and num < 1:
        raise ConfigError.of(f"--num {num}", "is no number of shards.", f"Write --num {USUAL_NUM}.")
    try:
        files_of = _files(source, suffixes)
        classes = tuple(in_order(name for files in files_of.values() for name, _ in files))
        done, total, num_bytes = 0, sum(map(len, files_of.values())), 0
        out = out.resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{out.name}.part-", dir=out.parent) as holder:
            partial = Path(holder) / "shards"
            for split, files in files_of.items():
                (partial / split).mkdir(parents=True, exist_ok=True)
                samples = _samples(files, source / split, classes, seed)
                number_of_shards = min(num or USUAL_NUM, len(samples))
                for number in range(number_of_shards):
                    name = f"{number:0{max(4, len(str(number_of_shards - 1)))}}.tar"
                    for size in _packed(partial / split / name, samples[number::number_of_shards]):
                        done, num_bytes = done + 1, num_bytes + size
                        on_file(done, total)
            (partial / CLASSES).write_text(json.dumps(classes, indent=1) + "\n", encoding="utf-8")
            for list_of_a_split in LISTS:
                if (source / list_of_a_split).is_file():
                    shutil.copyfile(source / list_of_a_split, partial / list_of_a_split)
            partial.rename(out)
    except OSError as error:
        problem = f"{error.filename or out} can't be read or written: {error.strerror or error}"
        raise DataError(f"{problem}. Check rights and free space, or name another folder.") from error
    return Written(tuple(sorted(out.rglob("*.tar"))), classes, total, num_bytes)


def _files(source: Path, suffixes: Sequence[str]) -> dict[str, list[tuple[str, Path]]]:
    """Returns class and path of each file by split.

    Leaves out files with another suffix, empty, in no class, or in a folder whose name begins with _.
    """
    if not source.is_dir():
        problem = "is no folder" if source.exists() else "does not exist"
        raise DataError(f"{source} {problem}. Name the folder that holds a folder for each class.")
    found: dict[str, list[tuple[str, Path]]] = {}
    for split, folder in splits_of(source).items():
        for path in files_below(folder):
            name = class_of(path.relative_to(folder))
            is_wanted = path.suffix.lower() in suffixes and path.is_file() and path.stat().st_size
            if name is not None and is_wanted and not name.startswith("_"):
                found.setdefault(split, []).append((name, path))
    if not found:
        wanted = " or ".join(f"*{suffix}" for suffix in suffixes)
        raise DataError(f"{source} has no {wanted} in folders of classes (<class>/...).")
    return found


def _samples(
    files: Sequence[tuple[str, Path]], source: Path, classes: Sequence[str], seed: int
) -> list[tuple[str, int, Path]]:
    """Returns key, number of the class and file of each sample, in the order in which they are packed."""
    order = sorted(files, key=lambda file: str(file[1]))
    random.Random(seed).shuffle(order)
    samples, taken = [], Counter[str]()
    for name, file in order:
        key = sample_key(file.relative_to(source).with_suffix("").as_posix())
        taken[key] += 1
        samples.append((key if taken[key] == 1 else f"{key}-{taken[key]}", classes.index(name), file))
    return samples


def _packed(path: Path, samples: Sequence[tuple[str, int, Path]]) -> Iterator[int]:
    """Writes a shard, and yields the size of each packed file."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as shard:
        for key, number, file in samples:
            content = file.read_bytes()
            for end, text in ((file.suffix.lower(), content), (".cls", str(number).encode())):
                member = tarfile.TarInfo(f"{key}{end}")
                member.size = len(text)
                shard.addfile(member, io.BytesIO(text))
            yield len(content)
