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
    from filelock import FileLock

FILE_NAME = ".lock"
"""Name of the lock file, and beginning of the name of the file that names its holder."""
_HOLDER = ".lock.json"
_LEFT_S = 6.0
"""Maximum seconds to wait for a holder that has no name yet, or is dead: forked children may keep its lock until they
notice its end."""
_held: set[Path] = set()
"""Folders that this process has locked."""


@contextmanager
def only_one(folder: Path, *, make: bool = False) -> Iterator[None]:
    """Locks a folder against other processes within the block, without waiting. Not reentrant within a process.

    Args:
        make: makes the folder.

    Raises:
        ConfigError: another process holds the lock, or the folder can't be made or locked.
    """
    if make:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{folder} can't be made: {error.strerror}."
            raise ConfigError.of("paths.log_dir", problem, "Name a folder that can be written.") from error
    lock = _locked(folder)
    key, holder = folder.resolve(), folder / _HOLDER
    _held.add(key)
    try:
        with suppress(OSError):  # a full disk
            holder.write_text(json.dumps(_this_process()), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        _held.discard(key)
        lock.release()


def _locked(folder: Path) -> FileLock:
    from filelock import FileLock, SoftFileLock, Timeout  # imports asyncio

    lock = FileLock(folder / FILE_NAME)
    try:
        lock.acquire(timeout=0 if _holder(folder) else _LEFT_S)
    except Timeout as error:
        raise refusal(folder, _shown(_holder(folder))) from error
    except (OSError, NotImplementedError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        way_out = "Name a folder that can be written, on a file system with file locks."
        raise ConfigError.of("paths.log_dir", f"{folder} can't be locked: {why}.", way_out) from error
    if issubclass(type(lock), SoftFileLock):  # filelock's substitute, which a killed process would leave behind
        lock.release()
        problem = f"{folder} can't be locked: its file system has no file locks."
        raise ConfigError.of("paths.log_dir", problem, "Name a folder on another file system.")
    return lock


def holds_nothing(folder: Path) -> bool:
    """Returns whether a folder holds nothing but its lock. Ask within the lock: another process may have been there."""
    with suppress(OSError):
        return all(path.name in (FILE_NAME, _HOLDER) for path in folder.iterdir())
    return False


def held_by(folder: Path) -> str | None:
    """Returns the process that holds the lock as text, ``process <id> on <host>``; None if it is free.

    The holder may be on another machine, or in a container. A dead holder counts as none, and so does this process.
    """
    if folder.resolve() in _held or not (folder / FILE_NAME).exists():
        return None
    from filelock import FileLock, Timeout

    lock = FileLock(folder / FILE_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = _holder(folder)
        return None if holder is None else _shown(holder)
    except (OSError, NotImplementedError):
        return None
    lock.release()
    return None


def refusal(folder: Path, holder: str) -> ConfigError:
    """Returns the error about a folder that another process has locked; ``holder`` is what `held_by` returns."""
    problem = f"another process is writing to it ({holder})."
    return ConfigError.of(str(folder), problem, "Wait for its end, stop it, or take another folder.")


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "host_name": socket.gethostname(), "boot_id": boot_id(), "process_start": process_start(pid)}


def _holder(folder: Path) -> dict[str, Any] | None:
    """Returns the process that holds a lock, which may be unnamed ({}); None if it is dead."""
    named: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        named = json.loads((folder / _HOLDER).read_text(encoding="utf-8"))
    return named if not named or is_alive(named) else None


def _shown(process: dict[str, Any] | None) -> str:
    return f"process {process['pid']} on {process['host_name']}" if process else "its name is not known"
