"""Locks a folder against a second process, on this machine or on another one that shares the folder.

The lock ends with the process that holds it. The lock file names that process meanwhile.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wellfed.errors import ConfigError
from wellfed.record import boot_id, is_alive, process_start

FILE_NAME = ".lock"
_held: dict[Path, bool] = {}
"""Folders that this process has locked -> whether it has named itself in the file, which may also be a user's own."""
_NAMED_WITHIN_S = 2.0
"""Seconds that a process which has just got the lock may take to write its name, on a busy machine."""
_POLL_S = 0.05
_MOST_TRIES = 100
"""Times that the lock file may be removed between opening and locking it."""
_MOST_BYTES = 4096
"""Bytes that are read of a lock file."""
_UNKNOWN = "another process"


@contextmanager
def only_one(folder: Path, *, make: bool = False) -> Iterator[None]:
    """Locks a folder against other processes within the block, without waiting. The lock file is kept.

    There is no lock if no file can be written. On a file system without locks, a living process of this machine that
    the file names is enough to refuse. Two at the same instant, or on two machines, are not kept apart there. Not
    reentrant within a process.

    Args:
        make: makes the folder, also if another process has just removed it.

    Raises:
        ConfigError: another process holds the lock, or the folder can't be made.
    """
    descriptor = _locked(folder, make=make)
    if descriptor is None:  # read-only, full, or gone: the next write reports it
        yield
        return
    key = folder.resolve()
    try:
        _held[key] = _name(descriptor)
        yield
    finally:
        if _held.pop(key, False):
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
        os.close(descriptor)  # also releases the lock


def holds_nothing(folder: Path) -> bool:
    """Returns whether a folder holds nothing but its lock. Ask within the lock: another process may have been there."""
    with suppress(OSError):
        return all(path.name == FILE_NAME for path in folder.iterdir())
    return False


def is_ours(folder: Path) -> bool:
    """Returns whether this process has locked the folder, by a lock file that is no user's own file."""
    return _held.get(folder.resolve(), False)


def held_by(folder: Path) -> str | None:
    """Returns the process that holds the lock as text, ``process <id> on <host>``; None if none does, or if unknown.

    It may be on another machine, or in a container. The lock is not taken for that: another process may want it now. A
    name alone, without the kernel's lock, does not count.
    """
    if folder.resolve() in _held:  # closing any descriptor of the file would unlock it
        return None
    try:
        descriptor = os.open(folder / FILE_NAME, os.O_RDWR)
    except OSError:
        return None
    try:
        return _shown(_named(descriptor)) if _is_locked(descriptor) else None
    finally:
        os.close(descriptor)


def _locked(folder: Path, *, make: bool) -> int | None:
    """Returns the lock file, open and locked if the file system has locks; None if it can't be opened."""
    for _ in range(_MOST_TRIES):
        try:
            if make:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{folder} can't be made: {error.strerror}."
            raise ConfigError.of("paths.log_dir", problem, "Name a folder that can be written.") from error
        try:
            descriptor = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        before = _named(descriptor)
        try:
            _lock(descriptor)
        except (BlockingIOError, PermissionError) as error:  # EAGAIN or EACCES, depending on the system
            os.close(descriptor)
            raise refusal(folder, _shown(_holder(folder, before))) from error
        except OSError as error:  # no locks here
            if before is not None and _is_of_this_machine(before) and is_alive(before):
                os.close(descriptor)
                left = f" If there is no such process, delete {folder / FILE_NAME}."
                raise refusal(folder, _shown(before), left) from error
        if _is_at(descriptor, folder / FILE_NAME):
            return descriptor
        os.close(descriptor)  # its last holder has removed it since
    return None


def refusal(folder: Path, holder: str, left: str = "") -> ConfigError:
    """Returns the error about a folder that another process has locked; ``holder`` is what `held_by` returns."""
    who = "" if holder == _UNKNOWN else f" ({holder})"
    problem = f"another process is writing to it{who}."
    return ConfigError.of(str(folder), problem, f"Wait for its end, stop it, or take another folder.{left}")


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether a path is still that of an open file."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _name(descriptor: int) -> bool:
    """Writes this process into the lock file. Returns False, and writes nothing, if a user has a file of that name."""
    pid = os.getpid()
    me = {"pid": pid, "host_name": socket.gethostname(), "boot_id": boot_id(), "process_start": process_start(pid)}
    with suppress(OSError):  # a full disk
        if os.fstat(descriptor).st_size > 0 and _named(descriptor) is None:
            return False
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.ftruncate(descriptor, os.write(descriptor, json.dumps(me).encode() + b"\n"))
        os.fsync(descriptor)  # or another machine would not see it
    return True


def _holder(folder: Path, before: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the process that has locked a folder; None if its name is not in the file in time.

    A process that was killed leaves its name in the file until the next holder has written its own.

    Args:
        before: process that the file named before this process tried to lock it.
    """
    end_s = time.monotonic() + _NAMED_WITHIN_S
    while True:
        named: dict[str, Any] | None = None
        with suppress(OSError):
            descriptor = os.open(folder / FILE_NAME, os.O_RDONLY)  # anew: NFS shows new content to a new open
            try:
                named = _named(descriptor)
            finally:
                os.close(descriptor)
        is_over = time.monotonic() >= end_s
        if named is not None and is_alive(named) and (named != before or _is_of_this_machine(named) or is_over):
            return named
        if is_over:
            return None
        time.sleep(_POLL_S)


def _named(descriptor: int) -> dict[str, Any] | None:
    """Returns the process that a lock file names; None if it names none."""
    with suppress(OSError, ValueError, RecursionError):
        if os.fstat(descriptor).st_size == 0:
            return None
        os.lseek(descriptor, 0, os.SEEK_SET)
        found = json.loads(os.read(descriptor, _MOST_BYTES))
        if isinstance(found, dict) and type(found.get("pid")) is int and 0 < found["pid"] < 2**31:
            return found
    return None


def _is_of_this_machine(process: Mapping[str, Any]) -> bool:
    return process.get("host_name") == socket.gethostname()


def _shown(process: Mapping[str, Any] | None) -> str:
    """Returns a process as text. A dead one has only left its name in the file, so it is not shown."""
    if process is None or not is_alive(process):
        return _UNKNOWN
    return f"process {process['pid']} on {process.get('host_name')}"


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, _MOST_BYTES, os.SEEK_SET)  # no other process could read a locked byte
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _is_locked(descriptor: int) -> bool:
        try:
            _lock(descriptor)
        except OSError:
            return True
        return False

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        # Not flock: forked loader workers would inherit it and keep it for seconds after a kill.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _is_locked(descriptor: int) -> bool:
        try:
            os.lockf(descriptor, os.F_TEST, 0)
        except (BlockingIOError, PermissionError):
            return True
        except OSError:  # no locks here
            return False
        return False
