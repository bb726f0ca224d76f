"""Lists the members of a tar file with their offsets, and reports damage between them.

Python's ``tarfile`` parses the headers. Its own iteration ends silently at an unreadable header. Here that is reported,
and the walk continues at the next valid header.
"""

from __future__ import annotations

import io
import mmap
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tarfile import BLOCKSIZE as BLOCK

from wellfed.errors import DataError
from wellfed.units import MIB, show_bytes

NOT_CLOSED = "the file ends without the blocks of zeros that close it: it may have been cut off, and more be missing"
"""Damage that may stand for any number of members."""
_OTHERS = {
    tarfile.LNKTYPE: "a link", tarfile.SYMTYPE: "a link", tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}  # fmt: skip
_EXTENDED = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
"""Types of headers that hold names or records of the member after them; they have at most 1 MiB."""
_TYPE_AT = 156
_MAGIC, _MAGIC_AT = b"ustar", 257
_NOT_ZERO = re.compile(rb"[^\0]")
_COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstandard", b"PK": "zip",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar file."""

    name: str
    offset: int
    """Offset of its first byte in the tar file."""
    size: int


@dataclass(frozen=True, slots=True)
class Damage:
    """A part of a tar file that can't be used."""

    offset: int
    """Offset of the header at fault."""
    problem: str


def members(path: Path) -> Iterator[Member | Damage]:
    """Yields all files of a tar file in order, and the damage between them.

    Links, devices and names that lead out of a folder (absolute, with ``..``) count as damage: their bytes are not
    read. Concatenated archives are read as one.

    Raises:
        DataError: the file can't be read, is empty, is compressed, or is not a tar file.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise DataError(f"{path} is empty. Make it again, or take it out of the folder.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for start, kind in _COMPRESSED.items():
                    if data[: len(start)] == start:
                        problem = f"is compressed ({kind}), and its members can't be found by their offset"
                        raise DataError(f"{path} {problem}. Unpack it to a plain .tar first.")
                yield from _members(path, data)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}. Check its rights.") from error


def _members(path: Path, data: mmap.mmap) -> Iterator[Member | Damage]:
    # TarFile reads the first header at once and fails if it is damaged, so it is opened on an empty archive.
    archive = tarfile.TarFile(fileobj=io.BytesIO(bytes(BLOCK)), encoding="utf-8", errors="surrogateescape")
    archive.fileobj = data  # only read and seek are used
    at, is_closed = 0, False
    while at < len(data):
        data.seek(at)
        try:
            _check_extended(data, at)
            info = tarfile.TarInfo.fromtarfile(archive)
        except Exception:  # noqa: BLE001  whatever tarfile raises for a damaged header
            if data[at : at + BLOCK] == bytes(BLOCK):
                is_closed = True
                # After the end of an archive comes another archive, or a member whose header was overwritten.
                found = _NOT_ZERO.search(data, at)
                at = len(data) if found is None else found.start() // BLOCK * BLOCK
                continue
            following = _next_header(data, at + BLOCK)
            if at == 0 and following is None and not _is_header(data[:BLOCK]):
                raise DataError(
                    f"{path} is no tar file: it has no header that can be read. Take it out of the folder."
                ) from None
            yield Damage(at, f"its header is {'damaged' if at + BLOCK <= len(data) else 'cut off'}")
            at = len(data) if following is None else following
            continue
        is_closed, start = False, info.offset_data
        problem = _problem(info, len(data) - start, has_bytes=archive.offset > start)
        if problem is None and info.isreg():
            yield Member(info.name, start, info.size)
        elif problem is not None:
            yield Damage(info.offset, problem)
        at = archive.offset
        if at < start or (at > start and info.size > len(data) - start):
            # The size itself may be wrong; the next members may still be valid.
            at = _next_header(data, start) or len(data)
    if not is_closed:
        yield Damage(len(data), NOT_CLOSED)


def _problem(info: tarfile.TarInfo, num_left: int, *, has_bytes: bool) -> str | None:
    """Returns why a member can't be used; None for files and folders."""
    if info.size < 0:
        return "its size is no number"
    if info.issparse() or any(key.startswith("GNU.sparse.") for key in info.pax_headers):
        return f"{info.name!r} is a sparse file, not a plain file"
    if has_bytes and info.size > num_left:
        return f"{info.name!r} is cut off: {show_bytes(num_left)} of {show_bytes(info.size)} are there"
    if info.isreg():
        return None if (problem := unsafe(info.name)) is None else f"{info.name!r} {problem}"
    if info.isdir():
        return None
    return f"{info.name!r} is {_OTHERS.get(info.type, f'of an unknown kind {info.type!r}')}, not a plain file"


def unsafe(name: str) -> str | None:
    """Returns the fault of a member's name, which must stay within the folder; None if it is safe."""
    if not name:
        return "has no name"
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
        return "has an absolute path"
    if ".." in re.split(r"[/\\]", name):
        return "leads out of its folder by '..'"
    return None


def _check_extended(data: mmap.mmap, at: int) -> None:
    """Raises a HeaderError if a header of names or records is of impossible size. tarfile would read all of it."""
    while data[at + _TYPE_AT : at + _TYPE_AT + 1] in _EXTENDED:
        size = tarfile.TarInfo.frombuf(data[at : at + BLOCK], "utf-8", "surrogateescape").size
        if not 0 <= size <= MIB:
            raise tarfile.HeaderError
        at += BLOCK + -(-size // BLOCK) * BLOCK


def _is_header(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except Exception:  # noqa: BLE001  whatever tarfile raises for a damaged header
        return False
    return True


def _next_header(data: mmap.mmap, start: int) -> int | None:
    """Returns the offset of the next valid header at or after ``start``, found by its magic bytes."""
    at = start + _MAGIC_AT
    while (found := data.find(_MAGIC, at)) >= 0:
        offset = found - _MAGIC_AT
        if offset % BLOCK == 0 and _is_header(data[offset : offset + BLOCK]):
            return offset
        at = found + 1
    return None
