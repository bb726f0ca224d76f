"""Formats the figures of a leaderboard: one table of columns for terminal and HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wellfed.study.objective import PEAK_MEMORY, SAMPLES_PER_JOULE, SAMPLES_PER_S, Objective
from wellfed.study.points.grid import BASELINE
from wellfed.study.points.space import show_value
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.study_files import SearchFile
from wellfed.units import show_count, show_duration, show_percent

METRIC = "{:.5g}".format
"""Words a metric."""


@dataclass(frozen=True)
class Column:
    """One figure of an entry."""

    head: str
    meaning: str
    figure: Callable[[Entry], Any]
    """None where it was not measured."""
    show: Callable[[Any], str] = str
    in_files_alone: bool = False
    """Left out of the terminal, which is too narrow."""

    def text(self, entry: Entry) -> str:
        """Returns the cell of an entry; empty where the figure was not measured."""
        figure = self.figure(entry)
        return "" if figure is None else self.show(figure)


def columns(board: Leaderboard) -> list[Column]:
    """Returns the columns that at least one entry with a figure fills; the score first."""
    file, objective = board.file, board.objective
    unit, noun = "samples" if isinstance(file, SearchFile) else file.sample_unit, objective.noun

    def of(other: Objective, *, in_files_alone: bool = False) -> Column:
        meaning = other.meaning.format(unit)
        return Column(other.head(unit), meaning, lambda entry: other(entry.row), other.number, in_files_alone)

    of_training = [
        Column(objective.title, objective.meaning, lambda entry: entry.row.value, METRIC),
        Column("at step", "optimizer steps until then", lambda entry: entry.row.value_step, show_count),
        Column("last", "the same metric at the last validation", lambda entry: entry.row.last_value, METRIC),
        Column("steps", "optimizer steps of the whole training", lambda entry: entry.row.trained_steps, show_count),
    ]
    of_timed = [
        Column(objective.head(unit), objective.meaning.format(unit), lambda entry: entry.score, objective.number),
        Column("95 % interval", f"where that {noun} lies", lambda entry: interval(entry, objective)),
        Column("of best", f"{noun} relative to the best", lambda entry: entry.of_best, show_percent),
        Column(
            "vs baseline",
            "how much better than the same settings with loader=baseline, with its 95 % interval; tied: noise may "
            "explain it; ?: its noise is unknown, since one of the two was measured once",
            _of_baseline,
        ),
        Column("runs", f"measurements that the {noun} is the mean of", lambda entry: entry.runs),
    ]
    known = [
        *(of_training if board.is_of_search else of_timed),
        of(SAMPLES_PER_S),
        of(PEAK_MEMORY),
        of(SAMPLES_PER_JOULE, in_files_alone=True),
        Column("ready", "steps whose batch was waiting", lambda entry: entry.row.readiness_frac, show_percent),
        Column("of ceiling", "rate over that of the ceiling", lambda entry: entry.ceiling_frac, show_percent, True),
        Column("GPU", "mean utilisation while training", lambda entry: entry.row.util_pct, "{:.1f} %".format),
        Column("took", "the trial, from the start of its process", lambda entry: entry.seconds, show_duration, True),
    ]
    unique = {column.head: column for column in reversed(known)}  # the score replaces the same figure again
    shown = [*board.ranked, *board.pruned]
    return [column for column in known if unique[column.head] is column and any(column.text(entry) for entry in shown)]


def _of_baseline(entry: Entry) -> str:
    factor = entry.of_baseline
    if factor is None or entry.values.get("loader") == BASELINE:
        return "" if factor is None else "1x"
    if entry.of_baseline_ci95 is None:
        return f"{factor:.2f}x?"
    low, high = entry.of_baseline_ci95
    return "tied" if low <= 1 <= high else f"{factor:.2f}x ({low:.2f} to {high:.2f})"


def interval(entry: Entry, objective: Objective) -> str:
    """Returns low and high of the 95 % interval; empty without one."""
    return "" if entry.ci95 is None else " to ".join(map(objective.number, entry.ci95))


def value_text(board: Leaderboard, value: str) -> str:
    """Returns a value for people: a sampler's numbers are rounded."""
    return show_value(value) if board.is_of_search else value
