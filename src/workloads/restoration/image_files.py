"""Finds the image files of a folder, and their splits."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wellfed import DataError
from wellfed.units import counted, show_line

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
"""Suffixes of image files, in any case."""
SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Names of folders that are used as splits, in any case."""
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ImageFile:
    """A file expected to hold an image."""

    name: str
    """Path within the folder, with slashes and printable characters."""
    path: Path
    split: str
    """``train``, ``val`` or ``test``; ``train`` without such folders."""


@dataclass(frozen=True)
class FoundImages:
    """Files of a folder."""

    folder: Path
    files: tuple[ImageFile, ...]
    """Files in the order training, validation, test; within each by (seed, name)."""
    split_folders: frozenset[str]
    """Splits with their own folder."""
    unreadable: tuple[tuple[str, str], ...]
    """Name and reason of files and folders that can't be opened."""
    notes: tuple[str, ...]


def find_images(folder: Path, seed: int) -> FoundImages:
    """Returns the image files below a folder; follows links.

    Raises:
        DataError: the folder is missing, it or one of its splits has no image, or there are no training images.
    """
    folder = folder.expanduser()
    name = f"workload.data.path={folder}"
    if not os.path.isdir(folder):
        problem = "is a file; name the folder that holds it" if os.path.exists(folder) else "no such folder"
        raise DataError(f"{name}: {problem}. Expected is a folder with images; path=null takes the embedded ones.")
    of_split, unreadable = _split_folders(folder), list[tuple[str, str]]()
    files, others, beside = list[ImageFile](), Counter[str](), 0
    for path in _walk(folder, folder, set(), unreadable):
        relative = path.relative_to(folder)
        if path.suffix.lower() not in SUFFIXES:
            others[path.suffix.lower() or path.name] += 1
        elif of_split and relative.parts[0] not in of_split:
            beside += 1
        elif problem := _problem(path):
            unreadable.append((_shown(relative), problem))
        else:
            files.append(ImageFile(_shown(relative), path, of_split.get(relative.parts[0], "train")))
    _refuse_missing(name, of_split, files, unreadable, others)
    notes = []
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(5))
        notes.append(f"{counted(others.total(), 'file')} of other kinds left out: {kinds}")
    if beside:
        notes.append(f"{counted(beside, 'image')} beside {_listed(of_split)} left out")
    files.sort(key=lambda file: (SPLITS.index(file.split), _rank(seed, file.name)))
    return FoundImages(folder, tuple(files), frozenset(of_split.values()), tuple(unreadable), tuple(notes))


def _shown(path: Path) -> str:
    """Returns a printable name, with undecodable bytes and line breaks escaped."""
    return show_line(os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace"))


def _listed(folders: Iterable[str]) -> str:
    *others, last = (f"{each}/" for each in folders)
    return f"{', '.join(others)} and {last}" if others else last


def _rank(seed: int, name: str) -> bytes:
    """Returns a sort key; adding or removing a file hardly changes the order."""
    return hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()


def _split_folders(folder: Path) -> dict[str, str]:
    """Returns the split of each folder named like one; empty without any."""
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder} can't be read: {error.strerror}. Check workload.data.path and its rights."
        ) from error
    return {each.name: SPLIT_FOLDERS[each.name.lower()] for each in inside if _is_split(each)}


def _is_split(path: Path) -> bool:
    return path.name.lower() in SPLIT_FOLDERS and os.path.isdir(path)


def _walk(top: Path, folder: Path, above: set[tuple[int, int]], unreadable: list[tuple[str, str]]) -> Iterator[Path]:
    """Yields the files below a folder, without hidden ones; skips links to a folder above."""
    try:
        state = folder.stat()
        inside = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        unreadable.append((f"{_shown(folder.relative_to(top))}/", error.strerror or str(error)))
        return
    identity = (state.st_dev, state.st_ino)
    if identity in above:
        return
    for entry in inside:
        if entry.name.startswith("."):
            continue
        path = folder / entry.name
        if os.path.isdir(path):  # Path.is_dir raises for an unreadable folder
            yield from _walk(top, path, above | {identity}, unreadable)
        else:
            yield path


def _problem(path: Path) -> str:
    """Returns why a file can't be opened; empty if it can."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "a named pipe, a socket or a device, not a file"
        with path.open("rb") as file:
            return "" if file.read(1) else "empty file"
    except FileNotFoundError:
        return "a link to a file that is not there"
    except OSError as error:
        return error.strerror or str(error)


def _refuse_missing(
    name: str,
    of_split: dict[str, str],
    files: list[ImageFile],
    unreadable: list[tuple[str, str]],
    others: Counter[str],
) -> None:
    """Raises DataError if there are no training images, or a split is empty."""
    if of_split and "train" not in of_split.values():
        raise DataError(
            f"{name} holds {_listed(of_split)} but no train/. "
            "Put the images to train on into train/, or rename the folders."
        )
    if not files and not of_split:
        found = [f"{counted(others.total(), 'other file')} ({', '.join(list(others)[:5])})"] if others else []
        found += [f"{file} ({reason})" for file, reason in unreadable[:3]]
        raise DataError(
            f"{name} holds {'; '.join(found) or 'nothing'}, and no image ({', '.join(SUFFIXES)}). "
            "Name the folder with the images; path=null takes the embedded ones."
        )
    for folder, split in of_split.items():
        if not any(file.split == split for file in files):
            raise DataError(
                f"{name}: {folder}/ holds no image. Put some there, or remove the folder: "
                f"{'then all images of the folder are split' if split == 'train' else 'then some of train/ are taken'}."
            )
