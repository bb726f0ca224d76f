"""Shows on the terminal how a tune gets on: a line a trial, then the table and the line to use."""

from __future__ import annotations

from wellfed.run.screen import Terminal
from wellfed.study.sweep.leaderboard_terminal import width
from wellfed.study.sweep.ledger import Row
from wellfed.study.sweep.objective import Objective
from wellfed.study.tune.search import Step
from wellfed.units import show_duration, show_line


class TuneScreen:
    """Draws nothing by itself: a thread beside would not survive the forks."""

    def __init__(self, objective: Objective, sample_unit: str) -> None:
        self._objective, self._unit = objective, sample_unit
        self._console = Terminal(soft_wrap=True, width=width())

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text)

    def refused(self, row: Row) -> None:
        """Said when the search has judged it."""

    def tick(self) -> None:
        """Nothing moves."""

    def goes_on(self, number: int, step: Step) -> None:
        """With what it had dropped."""
        self.say(f"Going on with {number}. {' '.join(step.change.turned)}: {show_line(step.why)}")

    def step(self, number: int, step: Step) -> None:
        """A trial has been judged."""
        trial, parts = step.trial, list[str]()
        if trial.figure is not None:
            parts.append(self._objective.show(trial.figure, self._unit))
        if step.before is not None:
            parts.append(f"{'kept' if step.is_kept else 'dropped'}: {show_line(step.why)}")
        elif not step.is_kept:
            parts.append(show_line(step.why))
        turned = " ".join(step.change.turned) or "the start"
        self.say(f"{number}. {turned}: {', '.join([*parts, show_duration(trial.seconds)])}")
