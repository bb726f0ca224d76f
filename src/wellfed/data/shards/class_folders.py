"""Walks folders of classes, and distinguishes folders of splits from folders of classes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from wellfed.errors import DataError

SPLITS = ("train", "val", "test")
LISTS = {"validation_list.txt": "val", "testing_list.txt": "test"}
"""Files next to the folders of classes that list the files of a split, one path a line (Speech Commands' layout)."""
CLASSES = "classes.json"
"""File next to shards with the names of the classes, in the order of their numbers."""
_NOT_IN_A_KEY = re.compile(r"[.:\\\s]+")


def splits_of(place: Path) -> dict[str, Path]:
    """Returns the folders of the splits, or the folder itself under ``""``.

    ``train`` is a split if it holds folders or tar files. With files alone it counts as a class.
    """
    here = {each.name: each for each in folders(place)}
    if "train" in here and any(each.is_dir() or each.suffix == ".tar" for each in _entries(here["train"])):
        return {split: here[split] for split in SPLITS if split in here}
    return {"": place}


def folders(place: Path) -> list[Path]:
    """Returns the folders directly in a folder, sorted by name."""
    return [each for each in _entries(place) if each.is_dir()]


def files_below(folder: Path) -> Iterator[Path]:
    """Yields all files below a folder, sorted by name. Follows links to folders; skips names that begin with a dot.

    Raises:
        DataError: a folder can't be read.
    """
    for each in _entries(folder):
        if not each.is_dir():
            yield each
        elif not folder.resolve().is_relative_to(each.resolve()):  # else a link to a folder above
            yield from files_below(each)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} can't be read: {error.strerror or error}. Check its rights.") from error


def class_of(inside: Path) -> str | None:
    """Returns the class of a file from its path within a folder of classes; None if it is in no class.

    Bytes that are not UTF-8 are written with backslashes, so that the name can be printed.
    """
    return os.fsencode(inside.parts[0]).decode("utf-8", "backslashreplace") if len(inside.parts) > 1 else None


def in_order(labels: Iterable[str]) -> list[str]:
    """Returns each class once, sorted by number if all are numbers, else by name."""
    found = set(labels)
    are_numbers = all(label.isdecimal() for label in found)
    return sorted(found, key=lambda each: (int(each), each)) if are_numbers else sorted(found)


def sample_key(name: str) -> str:
    """Returns the key in a shard for a path without its suffix. Dots would end the key; colons may mean a drive."""
    return _NOT_IN_A_KEY.sub("_", name)
