"""Makes the picture of a page: a heat map where exactly two knobs of a sweep vary, learning curves of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wellfed.explain.pages.chart import Axis, Chart, ChartCurve, Colour, Note, PagePicture, limits
from wellfed.study.board.columns import figure_text
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.study_files import SweepFile

_ACCENTED = 3
"""Ranks whose curves stand out."""


@dataclass(frozen=True)
class HeatMap:
    """Two axes against each other, the longer one downwards."""

    down: str
    across: str
    cells: Mapping[tuple[str, str], Entry]
    """Entry by its values."""
    lowest: float
    """`Entry.of_best` of the worst entry."""

    def heat(self, entry: Entry) -> float:
        """Returns 0 for the worst entry to 1 for the best."""
        return 1.0 if self.lowest == 1 else ((entry.of_best or 0.0) - self.lowest) / (1 - self.lowest)


def heat_map(board: Leaderboard) -> HeatMap | None:
    """Returns the map of two axes; None where another number of axes varies, or no point has a rank."""
    axes = board.file.axes if isinstance(board.file, SweepFile) else {}
    varied = sorted((axis for axis, values in axes.items() if len(values) > 1), key=lambda axis: -len(axes[axis]))
    if len(varied) != 2 or not board.ranked:
        return None
    down, across = varied
    cells = {(entry.values[down], entry.values[across]): entry for entry in board.entries}
    return HeatMap(down, across, cells, min(entry.of_best or 0.0 for entry in board.ranked))


def learning_curves(board: Leaderboard) -> PagePicture | None:
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
    return PagePicture(board.objective.title, [chart], caption=caption)
