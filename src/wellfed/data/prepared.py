"""Caches files made from a user's data (decoded images, parsed tables), so that they are made only once.

An entry is a folder ``<cache_dir>/<kind>/<digest>/``. It is filled under another name and then renamed, so it is
complete. No torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from wellfed.errors import DataError

_KIND = re.compile(r"[a-z][a-z0-9_]*")
_SILENT_WAIT_S = 5.0
"""Seconds to wait for another process before a message."""


def prepared(
    cache_dir: str | Path,
    kind: str,
    sources: Sequence[Path],
    settings: Mapping[str, Any],
    build: Callable[[Path], None],
) -> Path:
    """Returns the folder that ``build(folder)`` has filled, in this process or an earlier one.

    It is rebuilt if a source's path, size or time of change differs, or if the settings differ. If two processes
    request the same entry, one builds it and the other waits. ``wellfed cache clear`` removes a damaged entry.

    Args:
        kind: lower-case name of the folder for all entries of this kind, such as ``images``.
        sources: all files that the entry is made from. For a folder only its own time is compared, not its files'.
        settings: values that JSON can hold. Include a number that you raise when ``build`` changes.
        build: fills an empty folder. Write with ``file.write``, or reserve the space first (``os.posix_fallocate``): on
            a full disk, a process that writes through a memory map is killed.

    Raises:
        DataError: a source is missing.
        OSError: the disk is full, or the folder can't be written.
    """
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind={kind!r} is no lower-case name, as images is.")
    folder = Path(cache_dir).expanduser().absolute() / kind / digest(sources, settings)
    if folder.is_dir():
        return folder
    with _lock(folder):
        if not folder.is_dir():  # another process may have built it
            _build(folder, build, sources, settings)
    return folder


def digest(sources: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """Returns 16 hex digits that depend on each source's path, size and time of change, and on the settings.

    Raises:
        DataError: a source is missing.
    """
    seen = []
    for source in sources:
        path = Path(source).expanduser().absolute()
        try:
            found = path.stat()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}. It is to be prepared; check workload.data.path.") from error
        check_file(path)
        seen.append((str(path), found.st_size, found.st_mtime_ns))
    content = json.dumps([seen, settings], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def check_file(path: Path) -> None:
    """Raises a DataError for a named pipe, a socket or a device, where reading could wait for ever."""
    try:
        mode = path.stat().st_mode
    except OSError:  # reading raises it again
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(f"{path} is a pipe or a device, not a file. Write what it gives to a file, and name that.")


def _lock(folder: Path) -> AbstractContextManager[Any]:
    """Waits until no other process builds this entry; the lock ends with the ``with`` block."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        return lock.acquire(timeout=_SILENT_WAIT_S)
    except Timeout:
        print(f"Another process prepares {folder}; waiting for it.", file=sys.stderr, flush=True)
        return lock.acquire()


def _build(folder: Path, build: Callable[[Path], None], sources: Sequence[Path], settings: Mapping[str, Any]) -> None:
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed builder
    partial.mkdir()
    try:
        build(partial)
        if digest(sources, settings) != folder.name:
            raise DataError(f"{sources[0]}: what was to be prepared changed meanwhile. Start again when it is whole.")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
