"""Names and checks of checkpoint files. Needs only the standard library."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

LAST, BEST = "last.ckpt", "best.ckpt"
"""Names of checkpoint files."""


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
