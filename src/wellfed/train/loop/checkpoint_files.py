"""Names, replaces and checks of checkpoint files. Needs only the standard library."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LAST, BEST = "last.ckpt", "best.ckpt"
"""Names of checkpoint files."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside a file. What is written there takes the file's place, or is removed on failure."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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
