"""Shows on the terminal how a search gets on: a line a trial, and what is the best so far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from wellfed.run.screen import Terminal
from wellfed.study.search.board_terminal import show
from wellfed.study.search.search_board import SearchBoard
from wellfed.study.search.search_rows import SearchRow
from wellfed.study.search.space import show_value
from wellfed.study.sweep.leaderboard_terminal import width
from wellfed.study.sweep.rows import message_of
from wellfed.units import counted, show_duration


class SearchScreen:
    """Draws nothing by itself: a thread beside would not survive the forks."""

    def __init__(self) -> None:
        self._console = Terminal(soft_wrap=True, width=width())

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text)

    def began(self, number: int, values: Mapping[str, str]) -> None:
        """A trial runs now."""
        if self._console.is_terminal:
            self.say(f"trial {number} begins: {_short(values)}")

    def ended(self, row: SearchRow, values: Mapping[str, str], metric: str, best: SearchRow | None) -> None:
        """A trial has ended, or was refused."""
        figure = "" if row.value is None else f" {metric} {row.value:.5g}"
        word = row.outcome if row.outcome != "failed" else row.status
        after = f" after {counted(row.validations, 'validation')}" if row.outcome == "pruned" else ""
        why = "" if row.error is None else f": {message_of(row.error)}"
        first = " (best so far)" if best is row else ""
        took = f" in {show_duration(row.seconds)}" if row.seconds else ""
        self.say(f"trial {row.trial} {word}{figure}{first}{after}{took}: {_short(values)}{why}")

    def finished(self, board: SearchBoard, folder: Path) -> None:
        """What was found."""
        show(self._console, board, folder)


def _short(values: Mapping[str, str]) -> str:
    return " ".join(f"{axis}={show_value(value)}" for axis, value in values.items())
