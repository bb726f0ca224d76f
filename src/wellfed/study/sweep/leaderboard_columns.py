"""Writes the figures of a leaderboard as people read them: one table of columns for terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wellfed.study.sweep.objective import PEAK_MEMORY, SAMPLES_PER_JOULE, SAMPLES_PER_S, Objective
from wellfed.study.sweep.ranking import BASELINE, Entry, Leaderboard
from wellfed.units import show_duration, show_gib, show_percent


@dataclass(frozen=True)
class Column:
    """One figure of an entry."""

    head: str
    meaning: str
    text: Callable[[Entry], str]
    """Empty where it was not measured."""
    in_files_alone: bool = False
    """A terminal is too narrow."""


def columns(board: Leaderboard) -> list[Column]:
    """Those that at least one entry with a score has; the score first."""
    objective, unit = board.objective, board.sweep.sample_unit
    best = "over the highest" if objective.higher_is_better else "the smallest over it"
    turned = "over that" if objective.higher_is_better else "the one"

    def measured(other: Objective, **more: bool) -> Column:
        def text(entry: Entry) -> str:
            figure = other(entry)
            return "" if figure is None else other.number(figure)

        return Column(other.head(unit), other.meaning.format(unit), text, **more)

    known = [
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
            "may explain it; ?: its noise is unknown",
            _of_baseline,
        ),
        measured(SAMPLES_PER_S),
        Column("ready", "share of steps whose batch was waiting when asked for", lambda e: _percent(e.readiness_frac)),
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
            lambda e: "" if e.predicted_peak_gib is None else show_gib(e.predicted_peak_gib),
            in_files_alone=True,
        ),
        measured(SAMPLES_PER_JOULE, in_files_alone=True),
        Column("GPU", "mean utilisation while training", lambda e: _percent(e.util_pct, 100)),
        Column("runs", f"measurements that the {objective.noun} is the mean of", lambda e: str(e.runs)),
        Column(
            "took",
            "the trial, from the start of its process to its end",
            lambda e: "" if e.seconds is None else show_duration(e.seconds),
            in_files_alone=True,
        ),
    ]
    unique = {column.head: column for column in reversed(known)}  # the score in place of the same figure again
    return [
        column
        for column in known
        if unique[column.head] is column and any(column.text(entry) for entry in board.ranked)
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
    """Low and high of the 95 % interval; empty without one."""
    return "" if entry.ci95 is None else " to ".join(map(objective.number, entry.ci95))


def _percent(figure: float | None, whole: float = 1.0) -> str:
    return "" if figure is None else show_percent(figure / whole)
