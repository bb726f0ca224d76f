"""Keeps the rows of trials in a folder: those on disk and each new one, written at once."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, Protocol

from wellfed.masking import masked_override
from wellfed.record import Status
from wellfed.study.sweep import ledger
from wellfed.study.sweep.grid import GridPoint
from wellfed.study.sweep.ledger import R, Row, RowKind
from wellfed.study.sweep.rows import recorded_row, refused_row

_MAY_BE_RETRIED = ("oom", "failed", "killed", "timeout")


class TrialScreen(Protocol):
    """What is shown of many trials."""

    def say(self, text: str) -> None:
        """One line."""

    def refused(self, row: Row) -> None:
        """A point that will not be run."""

    def tick(self) -> None:
        """Some time has passed."""


class KeptRows(Generic[R]):
    """The rows of a folder, which nobody else writes to.

    Args:
        kind: of rows.
        retry: statuses whose trials are run again.
    """

    def __init__(self, folder: Path, kind: type[R], retry: Collection[str] = ()) -> None:
        self.folder, self._retry = folder, tuple(retry)
        self._found = ledger.read_rows(folder, kind)

    def says_damaged(self) -> list[str]:
        """Lines that hold no row."""
        text = "is cut or no row; its trial runs again unless its own record is whole."
        return [f"{ledger.FILE_NAME}: line {number} {text}" for number in self._found.damaged]

    def says_kept(self, group: str) -> list[str]:
        """What did not end well and is not run again; ``group`` has the knob that would."""
        statuses = [row.status for row in self._found.latest().values()]
        left = Counter(each for each in statuses if each in _MAY_BE_RETRIED and each not in self._retry)
        told = ", ".join(f"{number} {status}" for status, number in left.items())
        return [f"Kept as they are: {told}; {group}.retry=[{','.join(left)}] runs them again."] if left else []

    def _append(self, rows: Iterable[R]) -> None:
        rows = tuple(rows)
        self._found = replace(self._found, rows=(*self._found.rows, *rows))  # known, if it can't be written
        ledger.append(self.folder, rows)


class TrialLedger(KeptRows[Row]):
    """Those of trials that are timed.

    Args:
        code: the version of the code that measures now.
        retry: as of `KeptRows`.
    """

    def __init__(self, folder: Path, code: str, screen: TrialScreen, retry: Collection[str] = ()) -> None:
        super().__init__(folder, Row, retry)
        self._code, self._shown = code, screen
        self._processor = ""

    @property
    def is_empty(self) -> bool:
        """Nothing was ever measured here."""
        return not self._found.rows

    def note_machine(self, machine: str, processor: str) -> None:
        """Trials run on this one now, whose processor is one of them."""
        self._processor = processor

    def adopt(self, points: Sequence[GridPoint]) -> None:
        """Rows of trials that ended just when this was killed."""
        known = self._found.latest()
        begun = [self.begin(point, "trial") for point in points if point.id not in known]
        self._append(row for each in begun if (row := self._recorded(each)) is not None)

    def _recorded(self, begun: Row) -> Row | None:
        """The row of a trial that has ended by itself; None: it has not."""
        return recorded_row(begun, self.folder)

    def begin(self, point: GridPoint, kind: RowKind) -> Row:
        """What is known of a trial before it starts."""
        attempt = len(self._found.of(point.id, kind)) + 1
        return Row(
            point=point.id,
            kind=kind,
            overrides=tuple(masked_override(text) for text in point.overrides),
            status="failed",
            attempt=attempt,
            folder=point.id if kind == "trial" else f"{point.id}.{kind}{attempt}",
            code=self._code,
            host=socket.gethostname(),
            machine=self._processor,
        )

    def refuse(self, point: GridPoint, status: Status, problem: str, predicted_peak_gib: float | None = None) -> None:
        """A row for what is not run; once, however often the command is given, and never in place of a measured one."""
        row = refused_row(self.begin(point, "trial"), status, problem)
        row = replace(row, folder="", predicted_peak_gib=predicted_peak_gib)
        self._shown.refused(row)
        last = self._found.latest().get(point.id)
        is_measured = last is not None and last.status == "ok" and "ok" not in self._retry
        if not is_measured and (last is None or (last.status, last.error) != (row.status, row.error)):
            self._append([row])

    def add(self, row: Row) -> None:
        """A trial has ended."""
        self._append([row])
