"""Locks a folder against a second process, on this machine or on another one that shares the folder.

The kernel releases the lock when its process ends. A file beside the lock names that process.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellfed.errors import ConfigError
from wellfed.process import boot_id, is_alive, process_start

if TYPE_CHECKING:
    from filelock import BaseFileLock

FILE_NAME = ".lock"
"""Name of the lock file, and beginning of the name of the file that names its holder."""
_HOLDER = ".lock.json"
_LEFT_S = 6.0
"""Maximum seconds to wait for a dead holder: its forked children may keep the lock until they notice its end."""


@contextmanager
def only_one(folder: Path, *, make: bool = False) -> Iterator[None]:
    """Locks a folder against other processes within the block. Not reentrant within a process.

    Args:
        make: makes the folder.

    Raises:
        ConfigError: another process holds the lock, or the folder can't be made or locked.
    """
    holder = folder / _HOLDER
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
        holder.write_text(json.dumps(_this_process()), encoding="utf-8")
    except (OSError, NotImplementedError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        way_out = "Name a folder that can be written, on a file system with file locks."
        raise ConfigError.of("paths.log_dir", f"{folder} can't be locked: {why}.", way_out) from error
    try:
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def _locked(folder: Path) -> BaseFileLock:
    from filelock import FileLock, Timeout  # imports asyncio

    lock = FileLock(folder / FILE_NAME)
    try:
        lock.acquire(timeout=0 if _holder(folder) else _LEFT_S)
    except Timeout as error:
        raise refusal(folder, _holder(folder) or "its name is not known") from error
    return lock


def holds_nothing(folder: Path) -> bool:
    """Returns whether a folder holds nothing but its lock. Ask within the lock: another process may have been there."""
    return all(path.name in (FILE_NAME, _HOLDER) for path in folder.iterdir())


def held_by(folder: Path) -> str | None:
    """Returns the process that holds the lock as text, ``process <id> on <host>``; None if it is free.

    The holder may be on another machine, or in a container. A dead holder counts as none, and so does this process.
    """
    if not (folder / FILE_NAME).exists() or _named(folder).items() >= _this_process().items():
        return None
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / FILE_NAME, timeout=0):
            return None
    except Timeout:
        return _holder(folder)
    except (OSError, NotImplementedError):
        return None


def refusal(folder: Path, holder: str) -> ConfigError:
    """Returns the error about a folder that another process has locked; ``holder`` is what `held_by` returns."""
    problem = f"another process is writing to it ({holder})."
    return ConfigError.of(str(folder), problem, "Wait for its end, stop it, or take another folder.")


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "host_name": socket.gethostname(), "boot_id": boot_id(), "process_start": process_start(pid)}


def _named(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / _HOLDER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _holder(folder: Path) -> str | None:
    """Returns the living process that is named beside a lock, as text."""
    named = _named(folder)
    return f"process {named['pid']} on {named['host_name']}" if named and is_alive(named) else None
