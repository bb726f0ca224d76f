"""Shows what a tune turned and what came of it: lines for the terminal, and the page ``tune.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wellfed.study.objective import OBJECTIVES, Objective
from wellfed.study.points.guided.gain import TuneGain
from wellfed.study.points.guided.tune_search import Advice, TuneSearch
from wellfed.study.points.guided.tune_steps import Step
from wellfed.study.row import Row
from wellfed.study.study_screen import StudyScreen
from wellfed.study.tune.tune_file import TuneFile, TurnsMeasured
from wellfed.study.tune.tune_options import WrittenOptions, train_command
from wellfed.units import counted, show_duration, show_factor, show_line

PAGE = "tune.md"
_HEADS = ("turned", "before", "after", "gain", "")
_WHY_WIDTH = 100


@dataclass(frozen=True)
class StepLine:
    """A step as a table shows it."""

    turned: str
    before: str
    after: str
    gain: str
    is_kept: bool
    why: str
    """Why it was kept or dropped."""
    because: str
    """Reason for the change."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of its row."""
        return self.turned, self.before, self.after, self.gain, f"{'kept' if self.is_kept else 'dropped'}: {self.why}"


def lines_of(steps: Sequence[Step], objective: Objective) -> list[StepLine]:
    """Returns a line a step, the start first."""

    def shown(figure: float | None) -> str:
        return "-" if figure is None else objective.number(figure)

    return [
        StepLine(
            turned=" ".join(step.change.turned) or "(the start)",
            before=shown(step.before),
            after=shown(step.trial.figure),
            gain="-" if step.gain is None else show_factor(step.gain),
            is_kept=step.is_kept,
            why=show_line(step.why),
            because=show_line(step.change.because),
        )
        for step in steps
    ]


def as_text(steps: Sequence[Step], objective: Objective, sample_unit: str) -> Iterator[str]:
    """Yields lines for a terminal: the table, and under each row what led to it."""
    lines = lines_of(steps, objective)
    heads = (*_HEADS[:1], *(f"{head} ({objective.head(sample_unit)})" for head in _HEADS[1:3]), *_HEADS[3:])
    widths = [max(len(row[column]) for row in (heads, *(line.cells for line in lines))) for column in range(4)]
    for row, because in ((heads, ""), *((line.cells, line.because) for line in lines)):
        first, *numbers = (cell.rjust(width) for cell, width in zip(row[1:4], widths[1:], strict=True))
        yield "  ".join((row[0].ljust(widths[0]), first, *numbers, row[4])).rstrip()
        if because and row[0] != "(the start)":
            yield f"    {because if len(because) <= _WHY_WIDTH else because[: _WHY_WIDTH - 3] + '...'}"


def as_markdown(steps: Sequence[Step], objective: Objective, sample_unit: str) -> Iterator[str]:
    """Yields the same as a table of markdown."""
    unit = objective.head(sample_unit)
    yield f"| turned | before ({unit}) | after ({unit}) | gain | kept or dropped | what led to it |"
    yield "|---|---:|---:|---:|---|---|"
    for line in lines_of(steps, objective):
        cells = (*line.cells, line.because)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def advice_in_words(advice: Sequence[Advice]) -> Iterator[str]:
    """Yields what was not tried and why, one line each."""
    for each in advice:
        yield f"{' '.join(each.overrides)}: {each.why_not}, so it was not tried. {show_line(each.message)}"


def gain_in_words(gain: TuneGain | None, objective: Objective) -> str:
    """Returns what runs in turns have shown."""
    if gain is None:
        return f"No round gave {objective.a_noun} of both: nothing is known of the gain."
    said = f"{show_factor(gain.factor)} times as good in {objective.noun}"
    if gain.ci95 is None:
        return f"{said} in one round; it takes more to know noise from gain."
    low, high = map(show_factor, gain.ci95)
    verdict = "beyond noise" if gain.is_beyond_noise else "worse beyond noise" if gain.is_loss else "within noise"
    return f"{said} (95 % interval {low} to {high}, {gain.rounds} rounds in turns): {verdict}."


class TuneScreen(StudyScreen):
    """A line for each trial, when it is compared with the best."""

    def refused(self, row: Row) -> None:
        """Shows nothing: the step's line has the reason."""

    def ended(self, row: Row, best: Row | None) -> None:
        """Shows nothing: the step's line has the figure."""

    def goes_on(self, number: int, step: Step) -> None:
        """Shows that the search goes on with a change that it had dropped."""
        self.say(f"Going on with {number}. {' '.join(step.change.turned)}: {show_line(step.why)}")

    def step(self, number: int, step: Step) -> None:
        """Shows a trial that was compared with the best."""
        trial, shown = step.trial, list[str]()
        if trial.figure is not None:
            shown.append(self.objective.show(trial.figure, self.sample_unit))
        if step.before is not None:
            shown.append(f"{'kept' if step.is_kept else 'dropped'}: {show_line(step.why)}")
        elif not step.is_kept:
            shown.append(show_line(step.why))
        turned = " ".join(step.change.turned) or "the start"
        self.say(f"{number}. {turned}: {', '.join([*shown, show_duration(trial.seconds)])}")


@dataclass(frozen=True)
class TuneReport:
    """Lines and page that are made at the end."""

    file: TuneFile
    search: TuneSearch
    result: Step
    comparison: TurnsMeasured | None
    written: WrittenOptions

    @property
    def _objective(self) -> Objective:
        return OBJECTIVES[self.file.objective]

    def lines(self) -> Iterator[str]:
        """Yields lines for a terminal."""
        yield from ("", *as_text(self.search.steps, self._objective, self.file.sample_unit), "")
        yield from self._conclusions()
        yield f"Use it: {train_command(self.written.use)}"

    def page(self) -> str:
        """Returns the page as markdown."""
        file = self.file
        parts = [
            f"# Tune {file.name}",
            f"{file.workload} on {file.machine}, for {self._objective.noun}; code {file.code}.",
            "\n".join(as_markdown(self.search.steps, self._objective, file.sample_unit)),
            *self._conclusions(),
            f"```\n{train_command(self.written.use)}\n```",
        ]
        return "\n\n".join(parts) + "\n"

    def _conclusions(self) -> Iterator[str]:
        search, comparison = self.search, self.comparison
        spent = f"{counted(len(search.steps), 'trial')} in {show_duration(search.spent_seconds)}"
        yield f"{spent}; ended because {search.ended_because}."
        yield search.noise_in_words
        if comparison is None:
            yield "Nothing that was tried is better than the start beyond noise: the start stays."
        else:
            took = show_duration(comparison.seconds)
            yield f"Start and result in turn ({took}): {gain_in_words(comparison.gain, self._objective)}"
            if comparison.problem is not None:
                yield show_line(comparison.problem)
            if not self.result.change.overrides:
                yield "So the start stays."
        for line in advice_in_words(search.advice):
            yield f"Advice: {line}"
        if self.written.files:
            yield f"Written: {', '.join(map(str, self.written.files))}"
        else:
            yield f"No options were written: {self.written.why_not}."
        if self.written.unproven:
            yield f"Not proven: {train_command(self.written.unproven)}"
