"""Walks folders that are named as a class, and tells those of splits from those of classes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from wellfed.errors import DataError

SPLITS = ("train", "val", "test")
LISTS = {"validation_list.txt": "val", "testing_list.txt": "test"}
"""Beside the folders of classes, as Speech Commands has them: paths of the files of a split, one a line."""
CLASSES = "classes.json"
"""Beside shards: the names of the classes, in the order of their numbers."""
_NOT_IN_A_KEY = re.compile(r"[.:\\\s]+")


def splits_of(place: Path) -> dict[str, Path]:
    """The folders of the splits, or the folder itself under ``""``.

    ``train`` is a split where folders or tar files lie in it; with files alone it may be a class of that name.
    """
    here = {each.name: each for each in folders(place)}
    if "train" in here and any(_is_folder(each) or each.suffix == ".tar" for each in _entries(here["train"])):
        return {split: here[split] for split in SPLITS if split in here}
    return {"": place}


def folders(place: Path) -> list[Path]:
    """The folders that lie in one, by name; not those that lie in them."""
    return [each for each in _entries(place) if _is_folder(each)]


def files_below(folder: Path) -> Iterator[Path]:
    """All that is no folder, by name; links to folders are followed, names that begin with a dot left out.

    Raises:
        DataError: a folder can't be read.
    """
    return _below(folder, frozenset())


def _below(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    here = folder.resolve()
    if here in above:  # a link to a folder that it lies in
        return
    for each in _entries(folder):
        if _is_folder(each):
            yield from _below(each, above | {here})
        else:
            yield each


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise _unreadable(folder, error) from error


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # of a folder whose names alone may be read
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} can't be read: {error.strerror or error}. Check its rights.")


def class_of(inside: Path) -> str | None:
    """Class of a file by its path within a folder of classes; None if it lies in none.

    A name that is no UTF-8 is written with backslashes, so that it can be printed.
    """
    return os.fsencode(inside.parts[0]).decode("utf-8", "backslashreplace") if len(inside.parts) > 1 else None


def in_order(labels: Iterable[str]) -> list[str]:
    """Each class once: numbers by their size, names by the alphabet."""
    found = set(labels)
    are_numbers = all(label.isdecimal() for label in found)
    return sorted(found, key=lambda each: (int(each), each)) if are_numbers else sorted(found)


def sample_key(name: str) -> str:
    """The key in a shard of a file's path without its suffix: dots would end it, a colon may look like a drive."""
    return _NOT_IN_A_KEY.sub("_", name)
