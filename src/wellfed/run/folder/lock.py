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
from typing import Any

from wellfed.errors import ConfigError
from wellfed.process import boot_id, is_alive, process_start

FILE_NAME = ".lock"
"""Name of the lock file."""
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
    from filelock import FileLock, Timeout  # imports asyncio

    lock, holder, pid = FileLock(folder / FILE_NAME, fallback_to_soft=False), folder / _HOLDER, os.getpid()
    own = {"pid": pid, "host_name": socket.gethostname(), "boot_id": boot_id(), "process_start": process_start(pid)}
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        named = _named(holder)
        is_of_other = named not in ({}, own)  # own: this process has held it before it was replaced
        lock.acquire(timeout=0 if is_of_other and is_alive(named) else _LEFT_S)
        holder.write_text(json.dumps(own), encoding="utf-8")
    except Timeout as error:
        named = _named(holder)
        by = f"process {named['pid']} on {named['host_name']}" if named else "its name is not known"
        problem = f"another process is writing to it ({by})."
        raise ConfigError.of(str(folder), problem, "Wait for its end, stop it, or take another folder.") from error
    except OSError as error:
        if make:  # a folder that is kept may have a lock of somebody else
            with suppress(OSError):
                (folder / FILE_NAME).unlink(missing_ok=True)
                folder.rmdir()
        problem = f"{folder} can't be locked: {error.strerror or error}."
        way_out = "Name a folder that can be written, on a file system with file locks."
        raise ConfigError.of("paths.log_dir", problem, way_out) from error
    try:
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def _named(holder: Path) -> dict[str, Any]:
    """Returns the process that a file beside a lock names; nothing without one."""
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads(holder.read_text(encoding="utf-8"))
    return found


def holds_nothing(folder: Path) -> bool:
    """Returns whether a folder holds nothing but its lock. Ask within the lock: another process may have been there."""
    return all(path.name in (FILE_NAME, _HOLDER) for path in folder.iterdir())
