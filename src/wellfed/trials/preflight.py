"""What all trials of the same data and model would find out each, found out before them in processes of their stem."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.trials.fork_server import Job, Stem
from wellfed.trials.trial import Look, Rows

ROWS_S = 20
"""Feature rows that take longer are left to the trials."""


class Looks:
    """Asks stems; what it is told stays in a folder until it is left.

    Args:
        folder: not there, or of no use: left by a sweep that was killed.
        timeout_s: for each answer.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._asked = 0

    def __enter__(self) -> Looks:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def plans(self, stem: Stem[Any], points: Sequence[tuple[str, Composed[RunConfig]]]) -> list[dict[str, Any]]:
        """The lines of a `trial.Look`: the machine's, and one a point until one of them has ended the process.

        Raises:
            StemFailed: the stem is dead.
        """
        file = self._new_file("jsonl")
        self._ask(stem, Look(points, file), self._timeout_s)
        try:
            return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except (FileNotFoundError, ValueError):
            return []

    def rows(self, stem: Stem[Any]) -> Path | None:
        """Where all feature rows are; None where they can't be computed, or not in time.

        Raises:
            StemFailed: the stem is dead.
        """
        file = self._new_file("pt")
        self._ask(stem, Rows(file), min(ROWS_S, self._timeout_s))
        return file if file.exists() else None

    def _new_file(self, suffix: str) -> Path:
        self._asked += 1
        return self._folder / f"{self._asked}.{suffix}"

    def _ask(self, stem: Stem[Any], task: Look | Rows, timeout_s: float) -> None:
        stem.start(Job("look", self._folder, task))
        if not stem.connection.poll(timeout_s):
            stem.kill("look")
        stem.take()
