"""Shows on the terminal how a study gets on: a line a trial, or a bar with the best so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from wellfed.explain.report.text_table import console_width, print_text
from wellfed.run.screen import Terminal
from wellfed.study.objective import Objective
from wellfed.study.points.space import show_value
from wellfed.study.rows import Row
from wellfed.study.trial import Trial
from wellfed.study.trial_end import message_of
from wellfed.units import counted, show_duration, show_text


class StudyScreen:
    """Lines and a bar. No thread draws them: it would not survive the forks.

    Args:
        axes: knobs and groups that vary.
        sample_unit: unit of a timed study's samples.
    """

    def __init__(self, objective: Objective, axes: Collection[str] = (), sample_unit: str = "") -> None:
        self.objective, self._axes, self.sample_unit = objective, axes, sample_unit
        self.console = Terminal(soft_wrap=True, width=console_width())
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        """Prints a text of one line."""
        print_text(self.console, text)

    def begin(self, number: int, title: str, best: Row | None) -> None:
        """Announces a number of trials, with a bar on a terminal."""
        self.end()
        if not number:
            return
        self.say(title)
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self.console,
                auto_refresh=False,
            )
            self._bar.add_task(self._describe(best), total=number)
            self._bar.start()

    def tick(self) -> None:
        """Updates the clock of the bar."""
        if self._bar is not None:
            self._bar.refresh()

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
        self._advance(None)

    def ended(self, row: Row, best: Row | None) -> None:
        """Shows the end of a trial."""
        took = f" in {show_duration(row.seconds)}" if row.seconds else ""
        why = "" if row.error is None else f": {message_of(row.error)}"
        if row.trial is None:
            score = self._score(row)
            self.say(f"{row.status}{score and f' {score}'}{took}: {self.short(row)}{why}")
        else:
            figure = "" if row.value is None else f" {self.objective.name} {row.value:.5g}"
            status = row.outcome if row.outcome != "failed" else row.status
            after = f" after {counted(row.validations, 'validation')}" if row.outcome == "pruned" else ""
            first = " (best so far)" if best is row else ""
            self.say(f"trial {row.trial} {status}{figure}{first}{after}{took}: {self.short(row)}{why}")
        self._advance(best)

    def _advance(self, best: Row | None) -> None:
        if self._bar is not None:
            description = None if best is None else self._describe(best)
            self._bar.update(self._bar.task_ids[0], advance=1, description=description, refresh=True)

    def end(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def short(self, row: Row) -> str:
        """Returns the values of a row's axes."""
        return self._short(row.overrides, show_value if row.trial is not None else str)

    def _short(self, overrides: Sequence[str], shown: Callable[[str], str]) -> str:
        pairs = [text.partition("=") for text in overrides]
        return " ".join(f"{axis}={shown(value)}" for axis, _, value in pairs if axis in self._axes)

    def _describe(self, best: Row | None) -> str:
        if best is None or not (score := self._score(best)):
            return "best so far: none"
        return show_text(f"best so far: {score} with {self.short(best)}")

    def _score(self, row: Row) -> str:
        figure = self.objective(row)
        return "" if figure is None else self.objective.show(figure, self.sample_unit)
