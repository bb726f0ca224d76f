"""Writes and reads ``ledger.jsonl``: a line for each trial that ended, written at once and never changed.

An interrupted study loses at most the trials that were running. The same command again runs what is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TypeVar

from wellfed.errors import ConfigError
from wellfed.masking import masked_override
from wellfed.study.objective import Objective
from wellfed.study.points.grid import GridPoint
from wellfed.study.row import Row, RowKind, TrialMetric
from wellfed.study.trial_end import recorded_row

FILE_NAME = "ledger.jsonl"
_Point = TypeVar("_Point")
CONFIRMED = 3
"""Points measured again, the best of them; beside them the baseline of the first."""
CONFIRM_ROUNDS = 3
"""Rounds of these measurements, interleaved so that drift of the machine hits all points alike."""


@dataclass(frozen=True)
class Read:
    """The rows of a ledger."""

    rows: tuple[Row, ...]
    """In the order in which they were written."""

    @cached_property
    def _by_point(self) -> Mapping[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.point, []).append(row)
        return found

    @cached_property
    def latest(self) -> Mapping[str, Row]:
        """The last trial of each point."""
        return {row.point: row for row in self.rows if row.kind == "trial"}

    def confirms(self, point: str, kind: RowKind = "confirm") -> list[Row]:
        """Returns the rows of this kind that came after the last trial of a point and have its code."""
        own = self._by_point.get(point, [])
        last = max((number for number, row in enumerate(own) if row.kind == "trial"), default=len(own))
        return [row for row in own[last + 1 :] if row.kind == kind and row.code == own[last].code]

    def of(self, point: str, kind: str) -> list[Row]:
        """Returns all rows of a point, in order."""
        return [row for row in self._by_point.get(point, ()) if row.kind == kind]


def read(folder: Path) -> Read:
    """Returns the ledger of a study's folder; empty where there is none yet.

    A line that was cut by a kill or a full disk is skipped: its trial is still in its own folder, or runs again.

    Raises:
        OSError: it can't be read.
        ConfigError: it has rows of another version of wellfed.
    """
    path, rows = folder / FILE_NAME, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            found = json.loads(line)
            try:
                rows.append(Row.from_dict(found))
            except (KeyError, TypeError) as error:
                problem = f"has a row that this version of wellfed can't read ({error})."
                raise ConfigError.of(str(path), problem, "Give the study another name, or move its folder.") from error
    return Read(tuple(rows))


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


@dataclass
class Ledger:
    """The rows of one study in its folder, which no other process writes to."""

    folder: Path
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
    adopted_code: str = ""
    """Version of the code of trials that ended when an earlier command was killed; empty = `code`."""
    found: Read = field(init=False)

    def __post_init__(self) -> None:
        self.found = read(self.folder)

    @property
    def latest(self) -> Mapping[str, Row]:
        """The last trial of each point of the study."""
        known = self.found.latest
        return known if self.ids is None else {point: known[point] for point in self.ids if point in known}

    def missing(self, points: Iterable[str]) -> list[str]:
        """Returns the points that still have to be run, in the given order.

        These have no row, were interrupted, were refused before they could run, or have a status that is to be retried.
        """
        latest, again = self.found.latest, self._again
        return [point for point in points if point not in latest or latest[point].status in again]

    @property
    def _again(self) -> set[str]:
        """Statuses whose runs are run again."""
        return {"invalid", "infeasible", "interrupted", *self.retry}

    def repeats(self, point: str) -> list[Row]:
        """Returns the rows that repeat the last trial of a point, without those that are to be run again.

        A repeat with the status ok counts even with ``retry=[ok]``: the trial before it was run again already.
        """
        again = self._again - {"ok"}
        return [row for row in self.found.confirms(point, "repeat") if row.status not in again]

    def best_first(self) -> list[Row]:
        """Returns the latest rows that rank, by their trial alone."""
        found = [(self.objective(row), row) for row in self.latest.values() if row.status == "ok"]
        good = [(self.objective.goodness(figure), row) for figure, row in found if figure is not None]
        return [row for _, row in sorted(good, key=lambda each: -each[0])]

    def best(self) -> Row | None:
        """Returns the row that would be first."""
        return next(iter(self.best_first()), None)

    def to_confirm(self, among: Collection[str], baselines: Mapping[str, str] = {}) -> list[str]:
        """Returns the best and the baseline of the first, in turns; empty where there is nothing to compare.

        Nothing confirms a trial of other code.

        Args:
            among: ids of the points that can be run.
            baselines: as `baselines_of` returns them.
        """
        own = [row.point for row in self.best_first() if row.code == self.code and row.point in among]
        best = own[:CONFIRMED]
        if len(best) < 2:
            return []
        best += [point for point in own[CONFIRMED:] if point == baselines.get(best[0])]

        done = min(sum(row.status not in self._again for row in self.found.confirms(point)) for point in best)
        return [point for number in range(done, CONFIRM_ROUNDS) for point in in_turn(best, number)]

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
        row, last = recorded_row(begun, self.folder, self.metric), self.found.latest.get(point.id)
        if row is None or (last is not None and last.started_at == row.started_at):  # that of an earlier attempt
            return None
        row = replace(row, code=self.adopted_code or row.code)
        self.append(row)
        return row

    def set_aside(self) -> Path:
        """Renames the file, and begins anew without rows; returns its new path."""
        asides = (self.folder / f"{FILE_NAME}.before{number}" for number in count(1))
        aside = (self.folder / FILE_NAME).rename(next(path for path in asides if not path.exists()))
        self.found = Read(())
        return aside

    def append_refused(self, row: Row) -> None:
        """Writes the row of a point that is not run: once, and never in place of a measured row."""
        last = self.found.latest.get(row.point)
        is_measured = last is not None and last.status == "ok" and "ok" not in self.retry
        if not is_measured and (last is None or (last.status, last.error) != (row.status, row.error)):
            self.append(row)

    def append(self, row: Row) -> None:
        """Writes a row."""
        self.found = replace(self.found, rows=(*self.found.rows, row))  # known even if the write fails
        append(self.folder, [row])


def in_turn(points: Sequence[_Point], number: int) -> Sequence[_Point]:
    """Returns the points in the order of a round; every other runs backwards, so none always follows the same one."""
    return points if number % 2 == 0 else points[::-1]
