"""Keeps a second process from writing to a run folder, by a lock that ends with the process that holds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wellfed.errors import ConfigError

FILE_NAME = ".lock"
_held: set[Path] = set()
"""Folders whose lock this process holds."""


def made(folder: Path) -> Path:
    """The folder of a sweep, a search or a tune, made where there is none.

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
    """Keep every other process from entering with this folder; doesn't wait. The empty lock file stays behind.

    Where a file can't be written or the file system has no locks, it goes on without. Not for use twice in a process.

    Raises:
        ConfigError: another process is inside.
    """
    try:
        descriptor = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # read-only, full, or gone: what is written next tells
        yield
        return
    try:
        try:
            _lock(descriptor)
        except (BlockingIOError, PermissionError) as error:  # EAGAIN or EACCES, as the system likes
            problem = "another process is writing to it."
            raise ConfigError.of(str(folder), problem, "Wait for its end, or stop it.") from error
        except OSError:  # no locks here
            pass
        _held.add(folder.resolve())
        yield
    finally:
        _held.discard(folder.resolve())
        os.close(descriptor)  # and with it the lock


def is_held(folder: Path) -> bool:
    """Whether another process on this machine holds the lock, in another container too. False where nobody can know."""
    if folder.resolve() in _held:  # and closing any descriptor of the file would let go of it
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
        # lockf, not flock: forked loader workers would inherit a flock and keep it for seconds after a kill.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
