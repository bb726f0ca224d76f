"""Tells what was turned and what came of it: as lines of a screen, and as markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wellfed.study.sweep.objective import Objective
from wellfed.study.tune.gain import TuneGain
from wellfed.study.tune.search import Advice, Step
from wellfed.units import show_factor, show_line

_HEADS = ("turned", "before", "after", "gain", "")
_WHY_WIDTH = 100


@dataclass(frozen=True)
class StepLine:
    """A step, as a table shows it."""

    turned: str
    before: str
    after: str
    gain: str
    is_kept: bool
    why: str
    """What became of it."""
    because: str
    """What led to it."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Of its row."""
        return self.turned, self.before, self.after, self.gain, f"{'kept' if self.is_kept else 'dropped'}: {self.why}"


def lines_of(steps: Sequence[Step], objective: Objective) -> list[StepLine]:
    """One a step, the start first."""

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
    """Lines for a terminal: the table, and under each row what led to it."""
    lines = lines_of(steps, objective)
    heads = (*_HEADS[:1], *(f"{head} ({objective.head(sample_unit)})" for head in _HEADS[1:3]), *_HEADS[3:])
    widths = [max(len(row[column]) for row in (heads, *(line.cells for line in lines))) for column in range(4)]
    for row, because in ((heads, ""), *((line.cells, line.because) for line in lines)):
        first, *numbers = (cell.rjust(width) for cell, width in zip(row[1:4], widths[1:], strict=True))
        yield "  ".join((row[0].ljust(widths[0]), first, *numbers, row[4])).rstrip()
        if because and row[0] != "(the start)":
            yield f"    {because if len(because) <= _WHY_WIDTH else because[: _WHY_WIDTH - 3] + '...'}"


def as_markdown(steps: Sequence[Step], objective: Objective, sample_unit: str) -> Iterator[str]:
    """The same as a table of markdown."""
    unit = objective.head(sample_unit)
    yield f"| turned | before ({unit}) | after ({unit}) | gain | kept or dropped | what led to it |"
    yield "|---|---:|---:|---:|---|---|"
    for line in lines_of(steps, objective):
        cells = (*line.cells, line.because)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def advice_in_words(advice: Sequence[Advice]) -> Iterator[str]:
    """What was not tried and why, one line each."""
    for each in advice:
        yield f"{' '.join(each.overrides)}: {each.why_not}, so it was not tried. {show_line(each.message)}"


def gain_in_words(gain: TuneGain | None, objective: Objective) -> str:
    """What runs in turns have shown."""
    if gain is None:
        return f"No round gave {objective.a_noun} of both: nothing is known of the gain."
    said = f"{show_factor(gain.factor)} times as good in {objective.noun}"
    if gain.ci95 is None:
        return f"{said} in one round; it takes more to know noise from gain."
    low, high = map(show_factor, gain.ci95)
    verdict = "beyond noise" if gain.is_beyond_noise else "worse beyond noise" if gain.is_loss else "within noise"
    return f"{said} (95 % interval {low} to {high}, {gain.rounds} rounds in turns): {verdict}."
