"""Writes the figures of a search's leaderboard as people read them: one table for terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wellfed.study.search.search_board import SearchBoard, TrialEntry
from wellfed.study.search.search_rows import SearchRow
from wellfed.units import show_count, show_duration, show_gib


@dataclass(frozen=True)
class BoardColumn:
    """One figure of an entry."""

    head: str
    meaning: str
    text: Callable[[TrialEntry], str]
    """Empty where there is none."""


def columns(board: SearchBoard) -> list[BoardColumn]:
    """Those that at least one trial has that was trained to its end or pruned; the metric first."""
    file = board.search

    def of(show: Callable[[SearchRow], str]) -> Callable[[TrialEntry], str]:
        return lambda entry: "" if entry.row is None else show(entry.row)

    def optional(show: Callable[[float], str], figure: float | None) -> str:
        return "" if figure is None else show(figure)

    known = [
        BoardColumn(
            f"val/{file.metric}",
            "the best at any validation: that of checkpoints/best.ckpt",
            of(lambda row: optional(figure_text, row.value)),
        ),
        BoardColumn("at step", "optimizer steps until then", of(lambda row: optional(show_count, row.value_step))),
        BoardColumn(
            "last", "the same metric at the last validation", of(lambda row: optional(figure_text, row.last_value))
        ),
        BoardColumn("steps", "optimizer steps of the whole training", of(lambda row: show_count(row.trained_steps))),
        BoardColumn(
            "samples/s",
            "trained on in a second, after the warm-up",
            of(lambda row: optional(show_count, row.samples_per_s)),
        ),
        BoardColumn(
            "memory",
            "peak: reserved on the GPU; on a CPU growth",
            of(lambda row: optional(show_gib, row.peak_memory_gib)),
        ),
        BoardColumn(
            "took", "the trial, from the start of its process to its end", of(lambda row: show_duration(row.seconds))
        ),
    ]
    shown = [*board.ranked, *board.pruned]
    return [column for column in known if any(column.text(entry) for entry in shown)]


def figure_text(figure: float) -> str:
    """A metric with five digits."""
    return f"{figure:.5g}"
