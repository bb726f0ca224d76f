"""Counts unusable files, and raises an error beyond a limit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from wellfed import DataError
from wellfed.units import counted


class BadFiles:
    """Skipped files, with an error beyond ``limit``.

    Args:
        known: name and reason of files found earlier.

    Raises:
        DataError: ``known`` exceeds ``limit``.
    """

    def __init__(self, folder: Path, limit: int, known: Iterable[tuple[str, str]] = ()) -> None:
        self.folder, self.limit = folder, limit
        self.files: list[tuple[str, str]] = []
        for name, reason in known:
            self.add(name, reason)

    def add(self, name: str, reason: str) -> None:
        """Records a file.

        Raises:
            DataError: the number exceeds ``limit``.
        """
        self.files.append((name, reason))
        if len(self.files) > self.limit:
            raise DataError(
                f"More files of workload.data.path={self.folder} can't be used than "
                f"workload.data.max_bad_files={self.limit}; the first is {self._first()}. "
                "Replace or remove them, or raise the limit."
            )

    def notes(self) -> tuple[str, ...]:
        """Returns a sentence if files were skipped."""
        if not self.files:
            return ()
        return (f"{counted(len(self.files), 'bad file')} skipped, the first: {self._first()}",)

    def _first(self) -> str:
        name, reason = self.files[0]
        return f"{name}: {reason}"
