"""Lists the members of a tar file with their offsets."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from wellfed.errors import DataError

_REST = 2**20
"""Bytes looked at behind the last member. tar writes some KiB of zeros."""


def members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Yields all files of a tar file in order; ``offset_data`` is the offset of a file's first byte.

    Raises:
        DataError: the file can't be read, is not a plain tar file, is damaged or cut off, or holds links.
    """
    try:
        with path.open("rb") as file, tarfile.open(
            fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as archive:  # fmt: skip
            for info in archive:
                if info.isdir():
                    continue
                if not info.isreg() or info.issparse():
                    problem = f"holds {info.name}, which is a link, sparse or no file"
                    raise DataError(f"{path} {problem}. Pack it again with plain files: tar --hard-dereference.")
                yield info
            _check_end(path, file, archive.offset)
    except tarfile.TarError as error:
        problem = f"can't be read as a tar file ({error}): it is damaged, cut off, empty or compressed"
        raise DataError(f"{path} {problem}. Make it again, unpack it to a plain .tar, or take it out.") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}. Check its rights.") from error


def _check_end(path: Path, file: BinaryIO, offset: int) -> None:
    """Raises a DataError unless zeros follow the last member. tarfile ends at a damaged header without an error."""
    file.seek(offset)
    rest = file.read(_REST)
    if not rest:
        raise DataError(f"{path} ends without the blocks of zeros that close it: it was cut off. Make it again.")
    if any(rest):
        problem = f"can't be read behind byte {offset}: a header is damaged, or another archive follows"
        raise DataError(f"{path} {problem}. Make it again.")
