"""Writes and reads ``ledger.jsonl``: a line for each trial that ended, written at once and never changed.

An interrupted study loses at most the trials that were running. The same command again runs what is missing.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from wellfed.masking import masked_override
from wellfed.record import Status, bounded
from wellfed.study.objective import Objective
from wellfed.study.points.grid import GridPoint
from wellfed.study.row import Row, RowKind, TrialMetric
from wellfed.study.trial_end import recorded_row, refused_row
from wellfed.units import counted

FILE_NAME = "ledger.jsonl"
_LONGEST_LINE = 2**20
"""Characters of a row; a longer line is cut, and so no row."""
_MAY_BE_RETRIED = ("oom", "failed", "killed", "timeout")
CONFIRMED = 3
"""Points measured again, the best of them."""
CONFIRM_ROUNDS = 3
"""Rounds of these measurements, interleaved so that drift of the machine hits all points alike."""


@dataclass(frozen=True)
class Read:
    """The rows of a ledger."""

    rows: tuple[Row, ...]
    """In the order in which they were written."""
    damaged: tuple[int, ...]
    """Numbers, from 1, of lines that hold no row: cut by a crash or a full disk."""

    def latest(self, kind: str = "trial") -> dict[str, Row]:
        """Returns the last row of each point."""
        return {row.point: row for row in self.rows if row.kind == kind}

    def confirms(self, point: str) -> list[Row]:
        """Returns the rows that confirm the last trial of a point.

        They come after it and have its code, its device and its kind of machine. A run that ended before its device
        was recorded counts as failed.
        """
        own = [row for row in self.rows if row.point == point]
        last = max((place for place, row in enumerate(own) if row.kind == "trial"), default=None)
        if last is None:
            return []
        trial = own[last]
        return [
            row
            for row in own[last + 1 :]
            if row.kind == "confirm"
            and row.code == trial.code
            and (row.device == trial.device or (row.status != "ok" and not row.device))
            and (row.machine == trial.machine or not (row.machine and trial.machine))
        ]

    def of(self, point: str, kind: str) -> list[Row]:
        """Returns all rows of a point, in order."""
        return [row for row in self.rows if row.point == point and row.kind == kind]

    def says_left_out(self, shown: Iterable[str], noun: str) -> list[str]:
        """Returns sentences on what a table of the points ``shown`` lacks: rows of other grids, damaged lines."""
        says, others = [], {row.point for row in self.rows}.difference(shown)
        if others:
            says.append(f"{counted(len(others), 'point')} of earlier grids of this {noun} left out.")
        if self.damaged:
            lines = ", ".join(map(str, self.damaged))
            says.append(f"Left out of the ledger, cut by a crash or a full disk: line {lines}.")
        return says


def read(folder: Path) -> Read:
    """Returns the ledger of a study's folder; empty where there is none yet.

    Raises:
        OSError: it can't be read.
    """
    try:
        text = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return Read((), ())
    rows, damaged = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(Row.from_dict(bounded(json.loads(line[:_LONGEST_LINE]))))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            damaged.append(number)
    return Read(tuple(rows), tuple(damaged))


def append(folder: Path, rows: Iterable[Row]) -> None:
    """Writes rows at the end; they are on disk on return. The next row after a cut line starts a new line.

    Raises:
        OSError: not written, or not all of it.
    """
    text = "".join(f"{row.to_line()}\n" for row in rows)
    if not text:
        return
    with (folder / FILE_NAME).open("ab+") as stream:  # O_APPEND: one write stays together
        if stream.seek(0, os.SEEK_END) > 0:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                text = "\n" + text
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())


def missing(points: Iterable[str], found: Read, retry: Sequence[str] = ()) -> list[str]:
    """Returns the points that still have to be run, in order.

    These have no row, were interrupted, were refused before they could run, or have a status that is to be retried.
    """
    latest = found.latest()
    again = {"invalid", "infeasible", "interrupted", *retry}
    return [point for point in points if point not in latest or latest[point].status in again]


class TrialScreen(Protocol):
    """Screen that shows the rows of a ledger."""

    def say(self, text: str) -> None:
        """Prints one line."""

    def refused(self, row: Row) -> None:
        """Shows a point that will not be run."""

    def ended(self, row: Row, best: Row | None) -> None:
        """Shows the end of a trial, and the best so far."""


@dataclass
class Ledger:
    """The rows of one study in its folder, which no other process writes to."""

    folder: Path
    screen: TrialScreen
    objective: Objective
    """Ranks the rows."""
    code: str
    """Version of the code that trials run now."""
    retry: Sequence[str] = ()
    """Statuses whose trials are run again."""
    ids: Collection[str] | None = None
    """Points of the grid that is asked for now; None = all points of the ledger."""
    metric: TrialMetric | None = None
    """Ranks whole trainings; None = trials are timed."""
    keeps_code: bool = False
    """Rows made of trials' own records get `code`, not that of their record."""
    machine: str = ""
    """Processor and GPUs that trials run on; empty until known."""
    found: Read = field(init=False)

    def __post_init__(self) -> None:
        self.found = read(self.folder)

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever measured here."""
        return not self.found.rows

    def latest(self) -> dict[str, Row]:
        """Returns the last trial of each point of the study."""
        known = self.found.latest()
        return known if self.ids is None else {point: known[point] for point in self.ids if point in known}

    def missing(self, points: Iterable[str]) -> list[str]:
        """Returns the points that still have to be run, in the given order."""
        return missing(points, self.found, self.retry)

    def best(self) -> Row | None:
        """Returns the row that would be first."""
        return next(iter(self._best_first()), None)

    def best_among(self, points: Collection[str]) -> list[str]:
        """Returns the points that are measured again, the best first."""
        return [row.point for row in self._best_first() if row.point in points][:CONFIRMED]

    def _best_first(self) -> list[Row]:
        """Returns the latest rows that rank, by their trial alone."""
        found = [(self.objective(row), row) for row in self.latest().values() if row.status == "ok"]
        good = [(self.objective.goodness(figure), row) for figure, row in found if figure is not None]
        return [row for _, row in sorted(good, key=lambda each: -each[0])]

    def to_confirm(self, among: Collection[str]) -> list[str]:
        """Returns the best in turns, a round after the other; empty where there is nothing to compare."""
        best = self.best_among(among)
        if len(best) < 2:
            return []
        done = min(len(self.found.confirms(point)) for point in best)
        # Every other round runs backwards, so no point always follows the same one.
        return [point for number in range(done, CONFIRM_ROUNDS) for point in (best if number % 2 == 0 else best[::-1])]

    def host_of(self, point: str) -> str:
        """Returns the machine that a point was measured on; empty where unknown."""
        row = self.found.latest().get(point)
        return "" if row is None else row.host

    # -- writing ---------------------------------------------------------------------------------------------------

    def begin(self, point: GridPoint, kind: RowKind = "trial", trial: int | None = None) -> Row:
        """Returns what is known of a trial before it starts; ``trial`` numbers a whole training."""
        attempt = len(self.found.of(point.id, kind)) + 1
        return Row(
            point=point.id,
            kind=kind,
            overrides=tuple(map(masked_override, point.overrides)),
            status="failed",
            attempt=attempt,
            folder=point.id if kind == "trial" else f"{point.id}.{kind}{attempt}",
            code=self.code,
            trial=trial,
        )

    def adopt(self, point: GridPoint, trial: int | None = None) -> Row | None:
        """Keeps and returns the row of a trial that ended just when the study was killed.

        None where it had not ended, or has its row already.
        """
        begun = self.begin(point, "trial", trial)
        row, last = recorded_row(begun, self.folder, self.metric), self.found.latest().get(point.id)
        if row is None or (last is not None and last.started_at == row.started_at):  # that of an earlier attempt
            return None
        row = replace(row, overrides=begun.overrides, code=begun.code if self.keeps_code else row.code)
        self.append([row])
        return row

    def refuse(
        self,
        point: GridPoint,
        status: Status,
        problem: str,
        trial: int | None = None,
    ) -> Row:
        """Returns the row of a point that is not run.

        It is written once, however often the command is given, and never in place of a measured row.
        """
        row = refused_row(self.begin(point, "trial", trial), status, problem)
        row = replace(row, folder="")
        self._add_refused(row)
        return row

    def _add_refused(self, row: Row) -> None:
        last = self.found.latest().get(row.point)
        is_measured = last is not None and last.status == "ok" and "ok" not in self.retry
        if not is_measured and (last is None or (last.status, last.error) != (row.status, row.error)):
            self.append([row])
        self.screen.refused(row)

    def add(self, row: Row) -> None:
        """Writes and shows the row of a trial that has ended, or was refused when it was planned."""
        if row.status in ("invalid", "infeasible") and not row.folder:
            self._add_refused(row)
            return
        self._compare_machine(row)
        self.append([row])
        self.screen.ended(row, self.best())

    def append(self, rows: Iterable[Row]) -> None:
        """Writes rows without showing them."""
        rows = tuple(rows)
        self.found = replace(self.found, rows=(*self.found.rows, *rows))  # known even if the write fails
        append(self.folder, rows)

    # -- messages --------------------------------------------------------------------------------------------------

    def say_damaged(self) -> None:
        """Reports lines that hold no row."""
        for number in self.found.damaged:
            text = "is cut or no row; its trial runs again unless its own record is whole."
            self.screen.say(f"{FILE_NAME}: line {number} {text}")

    def say_kept(self, group: str) -> None:
        """Reports trials that did not end well and are not run again; ``group`` has the knob for retries."""
        statuses = [row.status for row in self.found.latest().values()]
        left = Counter(each for each in statuses if each in _MAY_BE_RETRIED and each not in self.retry)
        if left:
            listed = ", ".join(f"{number} {status}" for status, number in left.items())
            self.screen.say(f"Kept as they are: {listed}; {group}.retry=[{','.join(left)}] runs them again.")

    def note_machine(self, machine: str) -> None:
        """Sets the machine that trials run on from now; reports another one than before."""
        if self.machine not in ("", machine):
            self.screen.say(
                f"This is another machine than before ({self.machine} -> {machine}): rates of two machines are "
                "no comparison. Take another sweep.name to keep them apart."
            )
        self.machine = machine

    def _compare_machine(self, row: Row) -> None:
        """Reports the first trial on another kind of machine."""
        if row.status != "ok" or not row.machine or self.metric is not None:
            return
        self.machine = self.machine or f"{row.machine}; {row.device}"
        known = [each for each in self.latest().values() if each.status == "ok" and each.machine]
        is_new = row.host not in {each.host for each in known}
        if known and is_new and (row.machine, row.device) not in {(each.machine, each.device) for each in known}:
            self.screen.say(
                f"{row.host} is another kind of machine than those before ({row.machine}; {row.device}): rates of two "
                "kinds are no comparison, and the leaderboard marks them."
            )
