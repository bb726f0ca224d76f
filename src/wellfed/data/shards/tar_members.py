"""Lists the members of a tar file with where their bytes lie, and what is damaged in it.

Python's ``tarfile`` ends without a word at a header that it can't read; here the walk goes on at the next good one.
The format: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html and GNU tar's own long names and sizes.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wellfed.errors import DataError
from wellfed.units import show_bytes

BLOCK = 512
NOT_CLOSED = "the file ends without the blocks of zeros that close it: it may have been cut off, and more be missing"
"""One damage that may stand for any number of members."""
_ZEROS = bytes(BLOCK)
_FILE, _FOLDER, _SPARSE, _LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL = b"07\0", b"5", b"S", b"L", b"K", b"x", b"g"
_OTHERS = {
    b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe", _SPARSE: "a sparse file",
}  # fmt: skip
_WITHOUT_BYTES = b"123456"
"""Kinds that no content follows, whatever their size says: GNU tar keeps the size of a folder on disk there."""
_SOMETHING = re.compile(rb"[^\0]")
_MOST_OF_A_NAME = 2**20
"""Bytes of a long name or of pax records; more is no name."""
_MAGIC, _MAGIC_AT = b"ustar", 257


@dataclass(frozen=True, slots=True)
class Member:
    """A file within a tar file."""

    name: str
    offset: int
    """Of its first byte in the tar file."""
    size: int


@dataclass(frozen=True, slots=True)
class Damage:
    """What can't be used of a tar file, and where."""

    offset: int
    """Of the header in question."""
    problem: str


def members(path: Path) -> Iterator[Member | Damage]:
    """All files of a tar file in their order, with what is damaged between them.

    Links, devices and names that lead out of a folder (absolute, with ``..``) are damage: nothing of them is read. Two
    archives one after the other are read as one.

    Raises:
        DataError: the file can't be read, is empty, is compressed, or is no tar file at all.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise DataError(f"{path} is empty. Make it again, or take it out of the folder.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _refuse_others(path, data)
                yield from _Walk(data).members()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}. Check its rights.") from error


def _refuse_others(path: Path, data: mmap.mmap) -> None:
    kinds = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstandard", b"PK": "zip"}
    for start, kind in kinds.items():
        if data[: len(start)] == start:
            problem = f"is compressed ({kind}), and members of a compressed file can't be found by their place"
            raise DataError(f"{path} {problem}. Unpack it to a plain .tar first.")
    first = data[:BLOCK]
    if first.strip(b"\0") and not is_header(first) and _next_header(data, 0) is None:
        raise DataError(f"{path} is no tar file: it has no header that can be read. Take it out of the folder.")


class _Walk:
    """From header to header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._is_closed = data, 0, False
        self._name: str | None = None
        """Told by the header before, as are the size and whether the file is sparse."""
        self._size: int | None = None
        self._is_sparse = False

    def members(self) -> Iterator[Member | Damage]:
        while self._at < len(self._data):
            header = self._data[self._at : self._at + BLOCK]
            if header == _ZEROS:
                self._is_closed = True
                self._forget()
                # What follows the end of an archive is another one, or what is left of a member whose header is gone.
                found = _SOMETHING.search(self._data, self._at)
                self._at = len(self._data) if found is None else found.start() // BLOCK * BLOCK
            elif not is_header(header):
                yield self._damage("its header is damaged" if len(header) == BLOCK else "its header is cut off")
                self._go_on_after(self._at + BLOCK)
            else:
                self._is_closed = False
                yield from self._member(header)
        if not self._is_closed:
            yield Damage(len(self._data), NOT_CLOSED)

    def _member(self, header: bytes) -> Iterator[Member | Damage]:
        start, kind = self._at + BLOCK, header[156:157]
        size = _number(header[124:136])
        if size is None:
            yield self._damage("its size is no number")
            self._go_on_after(start)
            return
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL):
            if start + size > len(self._data) or size > _MOST_OF_A_NAME:
                yield self._damage("a name or the notes of a member are cut off, or too long")
                self._go_on_after(start)
            else:
                self._told(kind, self._data[start : start + size])
                self._at = start + _padded(size)
            return
        name, kind = self._name or _name(header), _SPARSE if self._is_sparse else kind
        size = 0 if kind in _WITHOUT_BYTES else size if self._size is None else self._size
        if start + size > len(self._data):
            there = show_bytes(max(0, len(self._data) - start))
            yield self._damage(f"{name!r} is cut off: {there} of {show_bytes(size)} are there")
            self._go_on_after(start)  # where the size itself is wrong, the next members are there all the same
            return
        if kind in _FILE:
            problem = unsafe(name)
            yield Member(name, start, size) if problem is None else self._damage(f"{name!r} {problem}")
        elif kind != _FOLDER:
            yield self._damage(f"{name!r} is {_OTHERS.get(kind, f'of an unknown kind {kind!r}')}, not a plain file")
        self._forget()
        self._at = start + _padded(size)

    def _told(self, kind: bytes, content: bytes) -> None:
        """Take note of what is said of the next member."""
        if kind == _LONG_NAME:
            self._name = _text(content.rstrip(b"\0"))
        elif kind == _PAX:
            records = _records(content)
            self._name = records.get("path", self._name)
            self._is_sparse = any(key.startswith("GNU.sparse.") for key in records)
            if (size := records.get("size", "")).isdecimal():
                self._size = int(size)

    def _forget(self) -> None:
        """What was said of a member must not be taken for the one after it."""
        self._name = self._size = None
        self._is_sparse = False

    def _go_on_after(self, start: int) -> None:
        self._forget()
        found = _next_header(self._data, start)
        self._at = len(self._data) if found is None else found

    def _damage(self, problem: str) -> Damage:
        return Damage(self._at, problem)


def is_header(block: bytes) -> bool:
    """Whether 512 bytes are a header whose checksum is right."""
    if len(block) != BLOCK:
        return False
    told = _number(block[148:156])
    return told is not None and told == sum(block) - sum(block[148:156]) + 8 * ord(" ")


def unsafe(name: str) -> str | None:
    """What is wrong with the name of a member that must stay within a folder; None if nothing is."""
    if not name:
        return "has no name"
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
        return "has an absolute path"
    if ".." in re.split(r"[/\\]", name):
        return "leads out of its folder by '..'"
    return None


def _next_header(data: mmap.mmap, start: int) -> int | None:
    """Offset of the next good header at or after ``start``."""
    at = max(0, start + _MAGIC_AT)
    while (found := data.find(_MAGIC, at)) >= 0:
        offset = found - _MAGIC_AT
        if offset % BLOCK == 0 and is_header(data[offset : offset + BLOCK]):
            return offset
        at = found + 1
    return None


def _number(field: bytes) -> int | None:
    """An octal number, or one of base 256, as GNU tar writes sizes from 8 GiB on; None if it is neither."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip(b" ") or b"0"
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else None


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _records(content: bytes) -> dict[str, str]:
    """Those of a pax header, ``25 path=a/long/name.wav\\n``; what can't be read ends them."""
    found: dict[str, str] = {}
    while match := re.match(rb"(\d{1,20}) ([^=]+)=", content):
        length = int(match[1])
        value = content[match.end() : length - 1]
        if not match.end() < length <= len(content):
            break
        found[_text(match[2])] = _text(value)
        content = content[length:]
    return found


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
