"""Tells what a tune has found: lines for the terminal, and the page ``tune.md``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wellfed.study.sweep.objective import OBJECTIVES, Objective
from wellfed.study.trials.tune_options import WrittenOptions, train_command
from wellfed.study.tune.search import Step, TuneSearch
from wellfed.study.tune.tune_file import TuneFile, TurnsMeasured
from wellfed.study.tune.tune_table import advice_in_words, as_markdown, as_text, gain_in_words
from wellfed.units import counted, show_duration, show_line

PAGE = "tune.md"


@dataclass(frozen=True)
class TuneReport:
    """All that is told at the end."""

    file: TuneFile
    search: TuneSearch
    result: Step
    comparison: TurnsMeasured | None
    written: WrittenOptions

    @property
    def _objective(self) -> Objective:
        return OBJECTIVES[self.file.objective]

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        yield from ("", *as_text(self.search.steps, self._objective, self.file.sample_unit), "")
        yield from self._conclusions()
        yield f"Use it: {train_command(self.written.use)}"

    def page(self) -> str:
        """As markdown."""
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
