"""Reads files of lines, some of which may be damaged."""

from __future__ import annotations

from pathlib import Path

from wellfed import DataError, check_file
from wellfed.units import counted


class BadLines:
    """A counter of skipped lines over all files that keeps the first, and raises an error beyond ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._first = ""

    def add(self, file: Path, number: int, line: bytes, reason: str) -> None:
        """Records line ``number`` (from 1).

        Raises:
            DataError: the number exceeds ``limit``.
        """
        self.count += 1
        if self.count == 1:
            shown = line[:80].decode("latin-1").rstrip("\r\n")
            self._first = f"{file}, line {number}: {reason}: {shown!r}"
        if self.count > self.limit:
            raise DataError(
                f"More bad lines than workload.data.max_bad_lines={self.limit}; the first is {self._first}. "
                f"Correct the file, fetch it again ({fetch_command(file)}), or raise the limit."
            )

    def notes(self) -> tuple[str, ...]:
        """Returns a sentence if lines were skipped."""
        if self.count == 0:
            return ()
        return (f"{counted(self.count, 'bad line')} skipped, the first: {self._first}",)


def fetch_command(file: Path) -> str:
    """Returns the command that downloads a file's release; files of -1M end in .dat."""
    return f"python -m workloads.recsys.download {'ml-1m' if file.suffix == '.dat' else 'ml-100k'}"


def read_file(file: Path) -> bytes:
    """Returns the bytes of a file in an 8-bit encoding, without a UTF-8 byte order mark.

    Raises:
        DataError: the file is unreadable, empty, or UTF-16/32.
    """
    check_file(file)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}. Check workload.data.path and its rights.") from error
    content = content.removeprefix(b"\xef\xbb\xbf")
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:4096]:
        raise DataError(
            f"{file}, line 1: UTF-16 or binary, not 8-bit text. "
            f"Convert it: iconv -f UTF-16 -t UTF-8 {file.name}. {_way_out(file)}"
        )
    if not content.strip():
        raise DataError(f"{file} is empty. {_way_out(file)}")
    return content


def _way_out(file: Path) -> str:
    if file.suffix == ".dat" or file.name.startswith("u."):
        return f"Fetch it again: {fetch_command(file)}"
    return "Write workload.data.path=FILE for another one."


def decode(line: bytes) -> str:
    """Returns the text of a line: UTF-8 if valid, else latin-1, MovieLens's encoding."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.decode("latin-1")
