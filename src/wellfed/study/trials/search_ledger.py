"""Keeps the rows of one search: those on disk and each new one, what is best, and the leaderboard of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from wellfed.masking import masked_override
from wellfed.record import Status
from wellfed.study.search import board_files
from wellfed.study.search.curves import CurvePoint, read_curve
from wellfed.study.search.search_board import SearchBoard, board, is_better
from wellfed.study.search.search_file import SearchFile
from wellfed.study.search.search_rows import SearchRow, adopted_row
from wellfed.study.sweep import ledger
from wellfed.study.sweep.grid import GridPoint
from wellfed.study.sweep.rows import refused_row
from wellfed.study.trials.search_screen import SearchScreen
from wellfed.study.trials.trial_ledger import KeptRows


class SearchLedger(KeptRows[SearchRow]):
    """The rows of a search in its folder, which nobody else writes to."""

    def __init__(self, folder: Path, file: SearchFile, retry: Sequence[str], screen: SearchScreen) -> None:
        super().__init__(folder, SearchRow, retry)
        self.file, self._screen = file, screen
        self._curves: dict[str, list[CurvePoint]] = {}
        self._is_new = False
        """A row has come that the leaderboard does not show."""

    @property
    def rows(self) -> tuple[SearchRow, ...]:
        """All of them, in order."""
        return self._found.rows

    def say_what_changed(self) -> None:
        """A ledger that is there already is gone on with; what makes its rows another matter is said."""
        say, latest = self._screen.say, self._found.latest()
        for text in self.says_damaged():
            say(text)
        if not latest:
            return
        states = Counter(row.outcome for row in latest.values())
        told = ", ".join(f"{number} {state}" for state, number in states.items())
        say(f"Going on in {self.folder}: {told} so far.")
        codes = {row.code for row in latest.values() if row.outcome == "complete"}
        if changed := sorted(codes - {self.file.code}):
            say(
                f"The code has changed since ({', '.join(changed)} -> {self.file.code}): what was trained before is "
                "kept. To train all again: another search.name."
            )
        for text in self.says_kept("search"):
            say(text)

    def latest(self) -> Mapping[str, SearchRow]:
        """The last row of each point."""
        return self._found.latest()

    def missing(self, points: Sequence[str]) -> list[str]:
        """Points that still have to be run, or are to be run again."""
        return ledger.missing(points, self._found, self._retry)

    def to_retry(self) -> list[SearchRow]:
        """Rows whose status is to be tried again."""
        return [row for row in self._found.latest().values() if row.status in self._retry]

    def best(self) -> SearchRow | None:
        """The best of those that trained to their end."""
        found = None
        for row in self._found.latest().values():
            if is_better(self.file, row, found):
                found = row
        return found

    def begin(self, point: GridPoint, number: int) -> SearchRow:
        """What is known of a trial before it starts."""
        return SearchRow(
            point=point.id,
            kind="trial",
            overrides=tuple(masked_override(text) for text in point.overrides),
            status="failed",
            attempt=len(self._found.of(point.id, "trial")) + 1,
            folder=point.id,
            code=self.file.code,
            trial=number,
        )

    def adopt(self, point: GridPoint, number: int) -> SearchRow | None:
        """The row of a trial that ended just when the search was killed; None where it had not ended, or has
        its row already."""
        row, last = adopted_row(self.begin(point, number), self.folder, self.file), self.latest().get(point.id)
        if row is None or (last is not None and last.started_at == row.started_at):  # nothing, or an earlier attempt's
            return None
        row = replace(row, overrides=tuple(masked_override(text) for text in point.overrides))
        self._append([row])
        return row

    def refuse(self, point: GridPoint, number: int, status: Status, problem: str) -> SearchRow:
        """A row for what is not run."""
        row = replace(refused_row(self.begin(point, number), status, problem), folder="")
        self.add(row, point)
        return row

    def add(self, row: SearchRow, point: GridPoint) -> None:
        """A trial has ended."""
        self._append([row])
        self._screen.ended(row, point.values, self.file.metric, self.best())

    def _append(self, rows: Iterable[SearchRow]) -> None:
        self._is_new = True
        super()._append(rows)

    def board(self) -> SearchBoard:
        """The leaderboard as it stands."""
        for row in self._found.latest().values():
            if row.folder and row.folder not in self._curves:
                self._curves[row.folder] = read_curve(self.folder / row.folder, self.file.metric)
        return board(self.file, self._found, self._curves)

    def forget_curve(self, folder: str) -> None:
        """Another trial writes to that folder now."""
        self._curves.pop(folder, None)

    def write_if_new(self) -> None:
        """As `write`, where a row has come since."""
        if self._is_new:
            self.write()

    def write(self) -> SearchBoard:
        """Put all that is made of the rows on disk."""
        made, self._is_new = self.board(), False
        try:
            self.file.write(self.folder)
            board_files.write(self.folder, made)
        except OSError as error:
            self._screen.say(f"The leaderboard can't be written: {error}. The rows are in {ledger.FILE_NAME}.")
        return made
