"""Caches files made from a user's data (decoded images, parsed tables), so that they are made only once.

An entry is a folder ``<cache_dir>/<kind>/<digest>/``. It is filled under another name and then renamed, so it is
complete. Its manifest detects later damage. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import json
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from wellfed.command_line import command
from wellfed.errors import DataError
from wellfed.record import LARGEST, regular, text_of
from wellfed.units import MIB

if sys.platform == "win32":
    fcntl = None  # Windows, which can't remove open files
else:
    import fcntl

MANIFEST = "manifest.json"
DIGEST = re.compile(r"[0-9a-f]{16}")
_KIND = re.compile(r"[a-z][a-z0-9_]*")
BLOCK_BYTES = 64 * 1024
NUM_BLOCKS = 16
"""Number of evenly spaced blocks read to check a member; smaller members are read whole."""
MOST_HELD = 64
"""Maximum number of entries that a process marks as in use, the latest requests."""
SILENT_WAIT_S = 5.0
_MOST_TRIES = 100
"""Times that the folder of the kind may be removed before the lock in it is there."""
_CANT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)  # the last: /proc
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_HAS_FALLBACK = "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters
_LOCK_OPTIONS: dict[str, Any] = {"fallback_to_soft": False} if _HAS_FALLBACK else {}
"""Options of `FileLock`. Without locks it would take a file for one, which a dead process of another host may keep."""


def prepared(
    cache_dir: str | Path,
    kind: str,
    sources: Sequence[Path],
    settings: Mapping[str, Any],
    build: Callable[[Path], None],
) -> Path:
    """Returns the folder that ``build(folder)`` has filled, in this process or an earlier one.

    It is rebuilt if a source's path, size or time of change differs, if the settings differ, or if the entry is
    damaged. Damage is detected by the sizes of all members and a checksum of 1 MiB of each (`NUM_BLOCKS`). Checking
    large files therefore costs no more than small ones, but a bit that flips between those blocks is not detected. If
    two processes request the same entry, one builds it and the other waits. The entry is marked as in use until this
    process ends.

    Args:
        kind: lower-case name of the folder for all entries of this kind, such as ``images``.
        sources: all files that the entry is made from. For a folder only its own time is compared, not its files'.
        settings: values that JSON can hold. Include a number that you raise when ``build`` changes.
        build: fills an empty folder. Write with ``file.write``, or reserve the space first (``os.posix_fallocate``): on
            a full disk, a process that writes through a memory map is killed.

    Raises:
        DataError: a source is missing, the disk is full, the folder can't be written, or ``build`` writes hundreds of
            thousands of files.
    """
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind={kind!r} is no lower-case name, as images is.")
    home = Path(cache_dir).expanduser().absolute()
    folder = home / kind / digest(sources, settings)
    if _is_whole(folder):
        return folder
    try:
        with only_builder(folder) as is_alone:
            if not _is_whole(folder):  # another process may have built it
                _remove_remains(folder, is_alone=is_alone)
                _build(folder, build, sources, settings)
                _is_whole(folder)  # marks it as in use
    except OSError as error:
        raise _as_data_error(error, home, kind) from error
    return folder


def digest(sources: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """Returns 16 hex digits that depend on each source's path, size and time of change, and on the settings.

    Raises:
        DataError: a source is missing.
    """
    seen = [(str(path), size, changed) for path, size, changed in map(_seen, sources)]
    content = json.dumps([seen, settings], sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def check_file(path: Path) -> None:
    """Raises a DataError for a named pipe, a socket or a device."""
    try:
        regular(path)
    except OSError as error:
        if error.errno == errno.EINVAL:  # reading raises other errors again
            text = f"{path} {error.strerror}. Write what it gives to a file, and name that."
            raise DataError(text) from error


def _seen(source: Path) -> tuple[Path, int, int]:
    path = Path(source).expanduser().absolute()
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. It is to be prepared; check workload.data.path.") from error
    check_file(path)
    return path, found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def only_builder(folder: Path, *, is_patient: bool = True) -> Iterator[bool]:
    """Waits until no other process builds or removes this entry. Yields whether that is sure (see `_locked`).

    Args:
        is_patient: whether to wait longer than `SILENT_WAIT_S`, and not to go on without the lock.
    """
    lock = None
    try:
        lock = _locked(folder, SILENT_WAIT_S)
    except Timeout:
        if is_patient:
            print(f"Another process prepares {folder}; waiting for it.", file=sys.stderr, flush=True)
            lock = _locked(folder)
    with lock or contextlib.nullcontext():
        yield lock is not None


def _locked(folder: Path, timeout_s: float = -1) -> contextlib.AbstractContextManager[Any] | None:
    """Returns the lock of an entry once it is free, and makes the folder for it; None on a file system without locks.

    Raises:
        Timeout: another process holds it.
        OSError: the folder can't be written.
    """
    lock = FileLock(_lock_file(folder), **_LOCK_OPTIONS)
    for _ in range(_MOST_TRIES):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            return lock.acquire(timeout=timeout_s)
        except FileNotFoundError:  # `cache clear` has just removed the folder
            continue
        except NotImplementedError:
            return None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return None
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder.parent))


def _build(folder: Path, build: Callable[[Path], None], sources: Sequence[Path], settings: Mapping[str, Any]) -> None:
    partial = folder.with_name(f"{folder.name}.{os.getpid()}-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        build(partial)
        _write_manifest(partial, sources, settings)
        if digest(sources, settings) != folder.name:
            raise DataError(
                f"{_first(sources)}: what was to be prepared changed meanwhile. Start again when it is whole."
            )
        try:
            partial.rename(folder)
        except OSError:
            if not _is_whole(folder):  # without file locks another process may have been first
                raise
    except (OSError, RuntimeError) as error:  # numpy and torch raise without naming the disk
        if shutil.disk_usage(partial).free < MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def _write_manifest(partial: Path, sources: Sequence[Path], settings: Mapping[str, Any]) -> None:
    members = {}
    for file in _files(partial):
        with file.open("rb") as opened:  # else a power failure could keep the name and lose the content
            os.fsync(opened.fileno())
        members[file.relative_to(partial).as_posix()] = _checked(file)
    manifest = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_source": _first(sources),
        "num_sources": len(sources),
        "settings": dict(settings),
        "members": members,
    }
    text = json.dumps(manifest, indent=1) + "\n"
    if len(text) > LARGEST:  # such a manifest would count as damaged
        problem = f"the list of its {len(members)} prepared files has {len(text) // MIB} MiB of {LARGEST // MIB}"
        raise DataError(f"{_first(sources)}: {problem} at most. Write fewer files.")
    (partial / MANIFEST).write_text(text, encoding="utf-8")


def _first(sources: Sequence[Path]) -> str:
    return str(_seen(sources[0])[0]) if sources else ""


def _remove_remains(folder: Path, *, is_alone: bool) -> None:
    """Removes a damaged entry and, if no other process can be building it, folders left by killed builders."""
    if folder.exists() and not _is_whole(folder):  # without locks another process may have just built it
        warnings.warn(f"{folder} was damaged and is made again.", stacklevel=3)
        shutil.rmtree(folder)
    for partial in folder.parent.glob(f"{folder.name}.*-*") if is_alone else ():
        shutil.rmtree(partial, ignore_errors=True)


def _as_data_error(error: OSError, home: Path, kind: str) -> Exception:
    """Returns a DataError for an error of writing the entry; other errors unchanged."""
    if error.errno in _NO_ROOM:
        way_out = f"{command('cache')} clear makes room; or set paths.cache_dir to a folder that has more."
        return DataError(f"{home}: there is no room for the prepared {kind} ({error.strerror}). {way_out}")
    place = Path(error.filename) if isinstance(error.filename, str) else home
    if error.errno in _CANT_WRITE and (place.is_relative_to(home) or home.is_relative_to(place)):
        way_out = "Set paths.cache_dir to a folder that can be written to."
        return DataError(f"{home}: the prepared {kind} can't be written there ({error.strerror}). {way_out}")
    return error


def _is_whole(folder: Path) -> bool:
    """Returns whether all members are unchanged since they were written, and marks the entry as in use."""
    try:
        mark = _in_use(folder / MANIFEST, regular(folder / MANIFEST).stat().st_ino)
        members = read_manifest(folder)["members"]
        is_whole = all(_checked(folder / name) == seen for name, seen in members.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # missing, or another program's manifest
        return False
    # Another process may have cleared it by renaming it.
    return is_whole and (mark is None or mark.is_of(folder / MANIFEST))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns an entry's manifest. Raises OSError or ValueError if it can't be read."""
    try:
        found = json.loads(text_of(folder / MANIFEST))
    except RecursionError:
        found = None
    if not isinstance(found, dict) or not _is_manifest(found):
        raise ValueError(f"{folder / MANIFEST} is no manifest.")
    return found


def _is_manifest(found: Mapping[str, Any]) -> bool:
    settings, number = found.get("settings", {}), found.get("num_sources", 0)
    return isinstance(found.get("members"), dict) and isinstance(settings, dict) and type(number) is int and number >= 0


def _checked(file: Path) -> list[Any]:
    """Returns the size, and a checksum of some blocks."""
    size = regular(file).stat().st_size
    found = hashlib.blake2b(digest_size=8)
    with file.open("rb") as opened:
        if size <= BLOCK_BYTES * NUM_BLOCKS:
            found.update(opened.read())
        else:
            for number in range(NUM_BLOCKS):
                opened.seek((size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
                found.update(opened.read(BLOCK_BYTES))
    return [size, found.hexdigest()]


class _InUse:
    """A shared lock on a manifest, held while this object or a process forked since exists."""

    def __init__(self, manifest: Path) -> None:
        self._descriptor = os.open(manifest, os.O_RDONLY)
        with contextlib.suppress(OSError):  # file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def is_of(self, manifest: Path) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._descriptor), manifest.stat())
        return False

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._descriptor)


@lru_cache(maxsize=MOST_HELD)
def _in_use(manifest: Path, inode: int) -> _InUse | None:
    """Returns the lock of an entry, cached until the process ends."""
    return None if fcntl is None else _InUse(manifest)


@contextlib.contextmanager
def nobody_uses(folder: Path) -> Iterator[bool]:
    """Yields whether no process uses or builds an entry, and blocks building meanwhile."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_locked(folder, 0) or contextlib.nullcontext())
            if fcntl is not None and (folder / MANIFEST).exists():
                descriptor = os.open(folder / MANIFEST, os.O_RDWR)  # a network file system locks no other
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (Timeout, BlockingIOError):
            yield False
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield True


def remove(folder: Path) -> bool:
    """Removes an entry or its remains; returns False, and keeps it, if a process uses or builds it.

    Raises:
        OSError: the folder can't be written.
    """
    entry = folder.with_name(folder.name.partition(".")[0])
    with nobody_uses(entry) as is_free:
        if is_free:
            away = entry.with_name(f"{entry.name}.{os.getpid()}-{secrets.token_hex(4)}")
            with contextlib.suppress(FileNotFoundError):  # another command has removed it
                folder.rename(away)  # atomic, so no process finds half of it
                shutil.rmtree(away)
            if not entry.exists():
                _lock_file(entry).unlink(missing_ok=True)
        return is_free


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
