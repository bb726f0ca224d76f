"""Formats the figures of a leaderboard: one table of columns for terminal and HTML, by the kind of study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wellfed.study.objective import PEAK_MEMORY, SAMPLES_PER_JOULE, SAMPLES_PER_S, Objective
from wellfed.study.points.grid import BASELINE
from wellfed.study.points.space import show_value
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.study_files import SearchFile, SweepFile
from wellfed.units import show_count, show_duration, show_gib, show_percent

_TOOK = "the trial, from the start of its process to its end"


@dataclass(frozen=True)
class Column:
    """One figure of an entry."""

    head: str
    meaning: str
    text: Callable[[Any], str]
    """Cell of an entry; empty where it was not measured."""
    in_files_alone: bool = False
    """Left out of the terminal, which is too narrow."""


def columns(board: Leaderboard) -> list[Column]:
    """Returns the columns that at least one entry with a figure fills; the score first."""
    file = board.file
    known = _of_trainings(file) if isinstance(file, SearchFile) else _of_timed(file)
    unique = {column.head: column for column in reversed(known)}  # the score replaces the same figure again
    shown = [*board.ranked, *board.pruned]
    return [column for column in known if unique[column.head] is column and any(column.text(entry) for entry in shown)]


def _of_timed(file: SweepFile) -> list[Column]:
    objective, unit = file.ranked_by, file.sample_unit
    best = "over the highest" if objective.higher_is_better else "the smallest over it"
    turned = "over that" if objective.higher_is_better else "the one"

    def measured(other: Objective, **more: bool) -> Column:
        def text(entry: Entry) -> str:
            figure = other(entry.row)
            return "" if figure is None else other.number(figure)

        return Column(other.head(unit), other.meaning.format(unit), text, **more)

    return [
        Column(
            objective.head(unit),
            objective.meaning.format(unit),
            lambda e: "" if e.score is None else objective.number(e.score),
        ),
        Column("95 % interval", f"where that {objective.noun} lies", lambda e: interval(e, objective)),
        Column("of best", f"{objective.noun} {best} {objective.noun}", lambda e: _percent(e.of_best)),
        Column(
            "vs baseline",
            f"{objective.noun} {turned} of the same settings with loader=baseline, and its 95 % interval; tied: noise "
            "may explain it; ?: its noise is unknown, since one of the two was measured once",
            _of_baseline,
        ),
        measured(SAMPLES_PER_S),
        Column(
            "ready", "share of steps whose batch was waiting when asked for", lambda e: _percent(e.row.readiness_frac)
        ),
        Column(
            "of ceiling",
            "rate over that of the same steps on batches that are on the device already",
            lambda e: _percent(e.ceiling_frac),
            in_files_alone=True,
        ),
        measured(PEAK_MEMORY),
        Column(
            "predicted",
            "the peak that was predicted before the trial",
            lambda e: "" if e.row.predicted_peak_gib is None else show_gib(e.row.predicted_peak_gib),
            in_files_alone=True,
        ),
        measured(SAMPLES_PER_JOULE, in_files_alone=True),
        Column("GPU", "mean utilisation while training", lambda e: _percent(e.row.util_pct, 100)),
        Column("runs", f"measurements that the {objective.noun} is the mean of", lambda e: str(e.runs)),
        Column(
            "took",
            _TOOK,
            lambda e: "" if e.seconds is None else show_duration(e.seconds),
            in_files_alone=True,
        ),
    ]


def _of_trainings(file: SearchFile) -> list[Column]:
    def column(head: str, meaning: str, figure: str, show: Callable[[Any], str]) -> Column:
        def text(entry: Entry) -> str:
            value = None if entry.status == "pending" else getattr(entry.row, figure)
            return "" if value is None else show(value)

        return Column(head, meaning, text)

    return [
        column(f"val/{file.metric}", file.ranked_by.meaning, "value", figure_text),
        column("at step", "optimizer steps until then", "value_step", show_count),
        column("last", "the same metric at the last validation", "last_value", figure_text),
        column("steps", "optimizer steps of the whole training", "trained_steps", show_count),
        column("samples/s", "trained on in a second, after the warm-up", "samples_per_s", show_count),
        column("memory", "peak: reserved on the GPU; on a CPU growth", "peak_memory_gib", show_gib),
        column("took", _TOOK, "seconds", show_duration),
    ]


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


def figure_text(figure: float) -> str:
    """Returns a metric with five digits."""
    return f"{figure:.5g}"


def value_text(board: Leaderboard, value: str) -> str:
    """Returns a value for people: a sampler's numbers are rounded."""
    return show_value(value) if board.is_of_search else value


def _percent(figure: float | None, whole: float = 1.0) -> str:
    return "" if figure is None else show_percent(figure / whole)
