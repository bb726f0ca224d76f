"""Shows on the terminal how a study gets on: a line a trial."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from wellfed.explain.report.text_table import console_width, print_text
from wellfed.run.screen import Terminal
from wellfed.study.objective import Objective
from wellfed.study.points.space import show_value
from wellfed.study.rows import Row
from wellfed.study.trial import Trial
from wellfed.study.trial_end import message_of
from wellfed.units import counted, show_duration


class StudyScreen:
    """Lines on the terminal, one a trial.

    Args:
        axes: knobs and groups that vary.
        sample_unit: unit of a timed study's samples.
    """

    def __init__(self, objective: Objective, axes: Collection[str] = (), sample_unit: str = "") -> None:
        self.objective, self._axes, self.sample_unit = objective, axes, sample_unit
        self.console = Terminal(soft_wrap=True, width=console_width())
        self._number = self._done = 0

    def say(self, text: str) -> None:
        """Prints a text of one line."""
        print_text(self.console, text)

    def begin(self, number: int, title: str) -> None:
        """Announces a number of trials, which are counted on their lines."""
        self._number, self._done = number, 0
        if number:
            self.say(title)

    def began(self, trial: Trial) -> None:
        """Shows on a terminal that a whole training runs now."""
        if self.console.is_terminal:
            self.say(f"trial {trial.number} begins: {self._short(trial.point.overrides, show_value)}")

    def refused(self, row: Row) -> None:
        """Shows a point that will not be run."""
        if row.trial is not None:
            self.ended(row, None)
            return
        short, message = self.short(row), (row.error or {}).get("message", "")
        self.say(f"{row.status}: {message}" if short in message else f"{row.status}: {short}: {message}")

    def ended(self, row: Row, best: Row | None) -> None:
        """Shows the end of a trial."""
        took = f" in {show_duration(row.seconds)}" if row.seconds else ""
        why = "" if row.error is None else f": {message_of(row.error)}"
        first = " (best so far)" if best is row else ""
        if row.trial is None:
            self._done += 1
            of_all = f", {self._done} of {self._number}" if self._done <= self._number else ""
            figure = self.objective(row)
            score = "" if figure is None else f" {self.objective.show(figure, self.sample_unit)}"
            self.say(f"{row.status}{score}{first}{took}{of_all}: {self.short(row)}{why}")
            return
        value = "" if row.value is None else f" {self.objective.name} {row.value:.5g}"
        status = row.outcome if row.outcome != "failed" else row.status
        after = f" after {counted(row.validations, 'validation')}" if row.outcome == "pruned" else ""
        self.say(f"trial {row.trial} {status}{value}{first}{after}{took}: {self.short(row)}{why}")

    def short(self, row: Row) -> str:
        """Returns the values of a row's axes."""
        return self._short(row.overrides, show_value if row.trial is not None else str)

    def _short(self, overrides: Sequence[str], shown: Callable[[str], str]) -> str:
        pairs = [text.partition("=") for text in overrides]
        return " ".join(f"{axis}={shown(value)}" for axis, _, value in pairs if axis in self._axes)
