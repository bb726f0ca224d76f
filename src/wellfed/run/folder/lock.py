"""Locks a run folder against a second process. The lock ends with the process that holds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wellfed.errors import ConfigError

FILE_NAME = ".lock"
_held: set[Path] = set()
"""Folders that this process has locked."""


def made(folder: Path) -> Path:
    """Makes the folder of a sweep, a search or a tune if it is missing, and returns it.

    Raises:
        ConfigError: it can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{folder} can't be made: {error.strerror}."
        raise ConfigError.of("paths.log_dir", problem, "Name a folder that can be written.") from error
    return folder


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes within the block, without waiting. The empty lock file is kept.

    There is no lock if no file can be written or the file system has no locks. Not reentrant within a process.

    Raises:
        ConfigError: another process holds the lock.
    """
    try:
        descriptor = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # read-only, full, or gone: the next write reports it
        yield
        return
    try:
        try:
            _lock(descriptor)
        except (BlockingIOError, PermissionError) as error:  # EAGAIN or EACCES, depending on the system
            problem = "another process is writing to it."
            raise ConfigError.of(str(folder), problem, "Wait for its end, or stop it.") from error
        except OSError:  # no locks here
            pass
        _held.add(folder.resolve())
        yield
    finally:
        _held.discard(folder.resolve())
        os.close(descriptor)  # also releases the lock


def is_held(folder: Path) -> bool:
    """Returns whether another process on this machine, or in a container on it, holds the lock; False if unknown."""
    if folder.resolve() in _held:  # closing any descriptor of the file would unlock it
        return False
    try:
        descriptor = os.open(folder / FILE_NAME, os.O_RDWR)
    except OSError:
        return False
    try:
        _lock(descriptor)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        # Not flock: forked loader workers would inherit it and keep it for seconds after a kill.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
