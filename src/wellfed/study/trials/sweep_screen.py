"""Shows on the terminal how a sweep gets on: a bar with the best so far, or a line a trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from wellfed.run.screen import Terminal
from wellfed.study.sweep.grid import SweepFile
from wellfed.study.sweep.leaderboard_terminal import show, width
from wellfed.study.sweep.ledger import Row
from wellfed.study.sweep.objective import OBJECTIVES
from wellfed.study.sweep.ranking import Leaderboard
from wellfed.study.sweep.rows import message_of
from wellfed.units import show_duration, show_text


class SweepScreen:
    """Draws nothing by itself: a thread beside would not survive the forks."""

    def __init__(self, folder: Path, file: SweepFile) -> None:
        self._folder, self._unit, self._axes = folder, file.sample_unit, file.axes
        self._objective = OBJECTIVES[file.objective]
        self._console = Terminal(soft_wrap=True, width=width())
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text)

    def refused(self, row: Row) -> None:
        """A point that will not be run."""
        short, message = self._short(row), (row.error or {}).get("message", "")
        self.say(f"{row.status}: {message}" if short in message else f"{row.status}: {short}: {message}")

    def begin(self, number: int, best: Row | None, title: str = "Trials") -> None:
        """So many trials come now."""
        self.end()
        if not number:
            return
        self.say(f"{title}: {number}, in {self._folder}")
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                auto_refresh=False,
            )
            self._bar.add_task(self._describe(best), total=number)
            self._bar.start()

    def tick(self) -> None:
        """Some time has passed."""
        if self._bar is not None:
            self._bar.refresh()

    def ended(self, row: Row, best: Row | None) -> None:
        """A trial has ended."""
        score = self._score(row)
        took = f" in {show_duration(row.seconds)}" if row.seconds else ""
        why = "" if row.error is None else f": {message_of(row.error)}"
        self.say(f"{row.status}{score and f' {score}'}{took}: {self._short(row)}{why}")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, description=self._describe(best), refresh=True)

    def end(self) -> None:
        """No trial runs any more."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def finished(self, board: Leaderboard, written: Sequence[Path]) -> None:
        """What was found."""
        show(self._console, board, written)

    def _describe(self, best: Row | None) -> str:
        if best is None or not (score := self._score(best)):
            return "best so far: none"
        return show_text(f"best so far: {score} with {self._short(best)}")

    def _score(self, row: Row) -> str:
        figure = self._objective(row)
        return "" if figure is None else self._objective.show(figure, self._unit)

    def _short(self, row: Row) -> str:
        return " ".join(text for text in row.overrides if text.partition("=")[0] in self._axes)
