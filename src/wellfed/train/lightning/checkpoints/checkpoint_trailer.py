"""Writes and checks the trailer of a checkpoint: facts and a SHA-256 digest, in the comment of its zip archive.

The digest is in the file itself, so it survives a rename, a copy and a crash. torch and zipfile ignore the comment.
Needs only the standard library.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

if sys.platform != "win32":
    import fcntl

LAST, BEST = "last.ckpt", "best.ckpt"
"""Names of checkpoint files."""
_BEGIN, _DIGEST = b"wellfed ", b" sha256 "
_HEX = 64
"""Hexadecimal digits of the digest."""
_MOST = 0xFFFF
"""Maximum length of a zip archive's comment, in bytes."""
_CHUNK = 1 << 20


class _Hashing:
    """A file for `torch.save` that hashes its content. It holds back the last two bytes, the length of the comment.

    `end` raises the errors of ``write``, which must not raise since C++ code calls it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self._held = file, hashlib.sha256(), b""
        self._failure: BaseException | None = None

    def write(self, content: Any) -> int:
        if self._failure is None:
            try:
                self._write(memoryview(content).cast("B"))
            except BaseException as error:  # noqa: BLE001  a signal's, too
                self._failure = error
        return len(content)

    def flush(self) -> None:
        """Does nothing, since there is no buffer."""

    def _write(self, content: memoryview) -> None:
        if len(content) >= 2:
            self._put(memoryview(self._held))
            self._put(content[:-2])
            self._held = bytes(content[-2:])
        else:
            held = self._held + bytes(content)
            self._put(memoryview(held[:-2]))
            self._held = held[-2:]

    def _put(self, content: memoryview) -> None:
        self._hash.update(content)
        while content:
            content = content[self._file.write(content) :]

    def end(self, facts: Mapping[str, Any]) -> None:
        """Writes the trailer; raises the error of an earlier ``write``."""
        if self._failure is not None:
            raise self._failure
        text = _BEGIN + json.dumps(facts).encode() + _DIGEST
        self._put(memoryview((len(text) + _HEX).to_bytes(2, "little") + text))
        self._put(memoryview(self._hash.hexdigest().encode()))


def write(path: Path, save: Callable[[Any], None], facts: Mapping[str, Any], *, is_shared: bool = False) -> None:
    """Writes a file with a trailer beside its target, flushes it to disk and renames it. Removes it on failure.

    Args:
        save: writes a zip archive without a comment to the given file.
        is_shared: whether another run may write the same path at the same time.
    """
    name = f".{path.name.lstrip('.')}"
    # One name, or `_own_file` removes the others: killed runs leave one file at most.
    with _own_file(path.parent, name) if is_shared else nullcontext(path.with_name(f"{name}.tmp")) as temporary:
        try:
            with temporary.open("wb", buffering=0) as file:
                hashing = _Hashing(file)
                try:
                    save(hashing)
                except Exception:
                    hashing.end({})  # raises the cause, if writing failed
                    raise
                hashing.end(facts)
                os.fsync(file.fileno())
            replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def _own_file(folder: Path, name: str) -> Iterator[Path]:
    """Yields a new temporary file that no other process writes or removes within the block.

    Removes such files of killed processes before. On Windows, and on a file system without locks, those stay.
    """
    if sys.platform == "win32":  # an open file can't be removed or renamed there
        yield folder / f"{name}.{os.urandom(4).hex()}.tmp"
        return
    for left in folder.glob(f"{escape(name)}.{'[0-9a-f]' * 8}.tmp"):
        with suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails as long as its writer lives
            left.unlink()
    while True:
        temporary = folder / f"{name}.{os.urandom(4).hex()}.tmp"
        with temporary.open("xb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_there = os.path.samestat(os.fstat(file.fileno()), temporary.stat())
            except (BlockingIOError, FileNotFoundError):  # another process has just taken it for a remainder
                continue
            except OSError:  # no locks here
                is_there = True
            if is_there:
                yield temporary
                return


def copy(source: Path, target: Path, facts: Mapping[str, Any]) -> None:
    """Copies a checkpoint like `write`, and adds facts to its own."""
    found, size = _trailer(source), source.stat().st_size
    own, left = ({}, size) if found is None else (found[0], found[2])

    def save(file: Any) -> None:
        with source.open("rb") as original:
            for chunk in _chunks(original, left):
                file.write(chunk)
        if found is not None:
            file.write(b"\0\0")  # the length of an empty comment

    write(target, save, {**own, **facts})


def replace(temporary: Path, path: Path) -> None:
    """Renames a file over another; flushes the folder to disk if the system can."""
    temporary.replace(path)
    with suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def facts_of(path: Path) -> dict[str, Any] | None:
    """Returns the facts in a trailer, even if the digest does not match; None without a trailer.

    Raises:
        OSError: the file can't be read.
    """
    found = _trailer(path)
    return None if found is None else found[0]


def is_intact(path: Path) -> bool | None:
    """Reads the whole file and returns whether the digest matches; None without a trailer.

    Raises:
        OSError: the file can't be read.
    """
    found = _trailer(path)
    if found is None:
        return None
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in _chunks(file, path.stat().st_size - _HEX):
            digest.update(chunk)
    return digest.hexdigest().encode() == found[1]


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the first bytes of a file, up to this size."""
    while size > 0 and (chunk := file.read(min(size, _CHUNK))):
        size -= len(chunk)
        yield chunk


def _trailer(path: Path) -> tuple[dict[str, Any], bytes, int] | None:
    """Returns facts, digest, and the offset of the comment's length; None without a trailer."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MOST))
        tail = file.read()
    text, digest = tail[:-_HEX], tail[-_HEX:]
    begin = text.rfind(_BEGIN + b"{")
    if begin < 0 or not text.endswith(_DIGEST):
        return None
    try:
        facts = json.loads(text[begin + len(_BEGIN) : -len(_DIGEST)])
    except ValueError:  # damaged, so the digest does not match either
        facts = {}
    return facts if isinstance(facts, dict) else {}, digest, size - len(tail) + begin - 2
