"""Names, writing and checking of checkpoint files. Needs only the standard library."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LAST, BEST = "last.ckpt", "best.ckpt"
"""Names of checkpoint files."""


def write(path: Path, save: Callable[[Path], None]) -> None:
    """Writes a file beside its target, flushes it to disk and renames it. Removes it on failure.

    Args:
        save: writes the file at the given path.
    """
    temporary = path.with_name(f".{path.name.lstrip('.')}.tmp")
    try:
        temporary.touch()  # raises an OSError where the file can't be made; torch.save would hide it
        save(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def replace(temporary: Path, path: Path) -> None:
    """Renames a file over another; flushes the folder to disk if the system can."""
    temporary.replace(path)
    with suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_intact(path: Path) -> bool:
    """Reads the whole file; returns whether it is an archive of torch.save with each entry's checksum (CRC-32).

    torch.load does not compare the checksums.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
            return "data.pkl" in names and archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError):
        return False  # RuntimeError: a damaged flag reads as encryption or an unknown method
