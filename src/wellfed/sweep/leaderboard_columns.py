"""The figures of a leaderboard as people read them: one table of columns for terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wellfed.sweep.leaderboard import Entry, Leaderboard
from wellfed.units import show_count, show_duration, show_gib, show_percent


@dataclass(frozen=True)
class Column:
    """One figure of an entry."""

    head: str
    meaning: str
    text: Callable[[Entry], str]
    """Empty where it was not measured."""


def columns(board: Leaderboard) -> list[Column]:
    """Those that at least one entry with a rate has."""
    unit = board.sample_unit
    known = (
        Column(f"{unit}/s", f"{unit} trained on in a second, after the warm-up", lambda e: _show(e.samples_per_s)),
        Column("95 % interval", "where that rate lies", interval),
        Column("of best", "rate over the highest rate", lambda e: _percent(e.of_best)),
        Column("vs baseline", "rate over that of the same settings with loader=baseline", _times),
        Column("ready", "share of steps whose batch was waiting when asked for", lambda e: _percent(e.readiness_frac)),
        Column(
            "of ceiling",
            "rate over that of the same steps on batches that are on the device already",
            lambda e: _percent(e.ceiling_frac),
        ),
        Column(
            "peak", "memory: reserved on the GPU; on a CPU growth of the process", lambda e: _gib(e.peak_memory_gib)
        ),
        Column("predicted", "the peak that was predicted before the trial", lambda e: _gib(e.predicted_peak_gib)),
        Column("GPU", "mean utilisation while training", lambda e: _percent(e.util_pct, 100)),
        Column("runs", "measurements that the rate is the mean of", lambda e: str(e.runs)),
        Column("took", "the trial, from the start of its process to its end", _took),
    )
    return [column for column in known if any(column.text(entry) for entry in board.ranked)]


def interval(entry: Entry) -> str:
    """Low and high of the 95 % interval; empty without one."""
    return "" if entry.ci95 is None else f"{show_count(entry.ci95[0])} to {show_count(entry.ci95[1])}"


def what_became(entry: Entry) -> str:
    """Why an entry has no rate, in a line."""
    if entry.error:
        return " ".join(f"{entry.error.get('message', '')} {entry.error.get('advice') or ''}".split())
    if entry.status == "ok":
        return "ended well, but too few steps were measured for a rate"
    if entry.status == "pending":
        return "no trial has ended yet"
    if entry.exit_code is None:
        return "nothing is known of its end"
    if entry.exit_code < 0:
        return f"ended by signal {-entry.exit_code}"
    return f"exit code {entry.exit_code}"


def _show(figure: float | None) -> str:
    return "" if figure is None else show_count(figure)


def _percent(figure: float | None, whole: float = 1.0) -> str:
    return "" if figure is None else show_percent(figure / whole)


def _gib(figure: float | None) -> str:
    return "" if figure is None else show_gib(figure)


def _times(entry: Entry) -> str:
    return "" if entry.of_baseline is None else f"{entry.of_baseline:.2f}x"


def _took(entry: Entry) -> str:
    return "" if entry.seconds is None else show_duration(entry.seconds)
