"""Names the two files that hold what a trial has printed, and reads their last lines."""

from __future__ import annotations

import os
from pathlib import Path

OUT, ERR = "stdout.txt", "stderr.txt"


def last_lines(path: Path, number: int) -> list[str]:
    """The last lines of a text that hold something; none where it can't be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 64 * 1024))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-number:]
