"""Draws the pictures of a search's page: learning curves, and the metric over each axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wellfed.explain.pages.chart import Axis, Chart, ChartCurve, Colour, Note, PagePicture, limits
from wellfed.study.board.columns import figure_text
from wellfed.study.points.space import Numbers
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.study_files import SearchFile

_ACCENTED = 3
"""Ranks whose curves stand out."""


def figures(board: Leaderboard) -> dict[str, Any]:
    """Returns what the template of the page shows beside the table."""
    assert isinstance(board.file, SearchFile)
    return {
        "curves": _curves(board, board.file),
        "axis_pictures": _axes(board, board.file),
        "pending": board.pending,
        **dict.fromkeys(("map", "picture")),
    }


def _curves(board: Leaderboard, file: SearchFile) -> PagePicture | None:
    """Returns the metric of every trial over its steps; None where no trial has two validations."""
    drawn_ones = [entry for entry in board.entries if len(entry.curve) > 1]
    if not drawn_ones:
        return None
    curves, notes = [], []
    for entry in drawn_ones:  # the best on top
        steps = np.array([point.step for point in entry.curve], dtype=float)
        values = np.array([point.value for point in entry.curve], dtype=float)
        stands_out = entry.rank is not None and entry.rank <= _ACCENTED
        colour: Colour = "accent" if stands_out else "soft"
        curves.append(ChartCurve("", colour, steps, values, is_strong=stands_out))
        last = np.flatnonzero(np.isfinite(values))[-1:]
        if entry.status != "complete":
            curves.append(ChartCurve("", "soft", steps[last], values[last], kind="crosses"))
        if stands_out:
            ends = zip(steps[last].tolist(), values[last].tolist(), strict=True)
            notes += [Note(at, value, str(entry.rank), "accent", "right") for at, value in ends]
    axis = Axis(*limits(np.concatenate([curve.x for curve in curves]), 0.0), "optimizer steps")
    low, high = limits(np.concatenate([curve.y for curve in curves]))
    listed = "; ".join(
        f"trial {entry.row.trial}: {figure_text(entry.curve[0].value)} to {figure_text(entry.curve[-1].value)}"
        for entry in drawn_ones[:_ACCENTED]
    )
    told = f"{len(drawn_ones)} learning curves over optimizer steps. {listed}"
    chart = Chart("", axis, curves, high, low, told, notes=notes, height=260)
    caption = "The first three ranks in colour, with their rank; a mark ends what was pruned or failed."
    return PagePicture(f"val/{file.metric}", [chart], caption=caption)


def _axes(board: Leaderboard, file: SearchFile) -> list[PagePicture]:
    """Returns the metric over each axis of numbers, if 3 trials have a metric."""
    valued = [entry for entry in (*board.ranked, *board.pruned) if entry.row.value is not None]
    numbers = {name: axis for name, axis in file.space.items() if isinstance(axis, Numbers)}
    return [_axis(name, axis, file, valued) for name, axis in numbers.items() if len(valued) >= 3]


def _axis(name: str, axis: Numbers, file: SearchFile, shown: Sequence[Entry]) -> PagePicture:
    at = np.array([float(entry.values[name]) for entry in shown])
    values = np.array([entry.row.value for entry in shown], dtype=float)
    ranked = np.array([entry.rank is not None for entry in shown])
    curves = [
        ChartCurve("trained to the end", "accent", at[ranked], values[ranked], kind="dots"),
        ChartCurve("pruned, at their best until then", "soft", at[~ranked], values[~ranked], kind="crosses"),
    ]
    begin, end = limits(at, 0.0 if axis.is_log else 0.05)
    if axis.is_log:
        begin, end = begin / 1.15, end * 1.15
    low, high = limits(values)
    told = f"The metric of {len(shown)} trials over {name}."
    scale = Axis(begin, end, name, "log" if axis.is_log else "number")
    chart = Chart("", scale, [curve for curve in curves if len(curve.x)], high, low, told, height=180)
    return PagePicture(f"val/{file.metric}", [chart])
