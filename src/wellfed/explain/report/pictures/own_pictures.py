"""Puts pictures that a workload's evaluation has written, PNG files, into the page of its run."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from wellfed.explain.report.pictures.picture_parts import PagePicture
from wellfed.explain.report.run_sections import own_files
from wellfed.record import RunRecord
from wellfed.units import MIB

MOST_PICTURES, MOST_BYTES = 8, MIB
"""In a page, which is one file, and of each of them; the others are named only."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def own_pictures(record: RunRecord, folder: Path) -> Iterator[PagePicture]:
    """The first of them, as they are; a file that is missing or no PNG is left out."""
    found = 0
    for name, path in own_files(record).items():
        content = _content(folder, path) if found < MOST_PICTURES and path.lower().endswith(".png") else None
        if content is not None:
            found += 1
            source = base64.b64encode(content).decode()
            yield PagePicture(Markup('<img alt="{}" src="data:image/png;base64,{}">').format(name, source), title=name)


def _content(folder: Path, path: str) -> bytes | None:
    try:
        file = (folder / path).resolve()
        if not file.is_relative_to(folder.resolve()) or file.stat().st_size > MOST_BYTES:
            return None
        content = file.read_bytes()
    except OSError:
        return None
    return content if content.startswith(_SIGNATURE) else None
