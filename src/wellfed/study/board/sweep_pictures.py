"""Makes the figures of a sweep's page: a heat map of two knobs, and the score against memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from wellfed.explain.pages.chart import Axis, Chart, ChartCurve, Colour, Kind, Note, PagePicture, limits
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.study_files import SweepFile
from wellfed.units import show_gib


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


def figures(board: Leaderboard) -> dict[str, Any]:
    """Returns what the template of the page shows beside the table."""
    ranked, front = board.ranked, [entry for entry in board.ranked if entry.on_front]
    front.sort(key=lambda entry: entry.row.peak_memory_gib or 0)
    return {
        "vertical": board.objective.against_memory,
        "tied": sum(entry.rank == 1 for entry in ranked) - 1,
        "top": max((figure for entry in ranked for figure in (entry.score or 0, *(entry.ci95 or ()))), default=0),
        "pending": board.pending,
        "map": _heat_map(board),
        "picture": _memory_picture(board),
        "front": front,
        "curves": None,
        "axis_pictures": None,
    }


def _heat_map(board: Leaderboard) -> HeatMap | None:
    """Returns the map of two axes; None where another number of axes varies, or no point has a rank."""
    assert isinstance(board.file, SweepFile)
    axes = {axis: values for axis, values in board.file.axes.items() if len(values) > 1}
    if len(axes) != 2 or not board.ranked:
        return None
    down, across = sorted(axes, key=lambda axis: -len(axes[axis]))
    cells = {(entry.values[down], entry.values[across]): entry for entry in board.entries}
    return HeatMap(down, across, cells, min(entry.of_best or 0.0 for entry in board.ranked))


def _memory_picture(board: Leaderboard) -> PagePicture | None:
    """Returns all points with both figures; None if no point has both.

    The Pareto front is joined and labelled with ranks, and is listed as text.
    """
    vertical = board.objective.against_memory
    assert isinstance(board.file, SweepFile)
    shown = [
        (entry.row.peak_memory_gib, height, entry)
        for entry in board.ranked
        if entry.row.peak_memory_gib is not None and (height := vertical(entry.row)) is not None
    ]
    if not shown:
        return None
    # In GiB from the least to the most; small ones, as on a CPU, in MiB.
    factor, unit = (1.0, "GiB") if max(peak for peak, _, _ in shown) >= 1 else (1024.0, "MiB")
    front = sorted(((peak, height, entry) for peak, height, entry in shown if entry.on_front), key=lambda at: at[0])
    others = [(peak, height) for peak, height, entry in shown if not entry.on_front]
    # A step: between two points of the front nothing was measured.
    joined = [point for (a, y, _), (b, *_) in pairwise(front) for point in ((a, y), (b, y))]
    points: list[tuple[str, Colour, Kind, list[tuple[float, float]]]] = [
        ("on the Pareto front", "accent", "dots", [(peak, height) for peak, height, _ in front]),
        ("other points", "soft", "dots", others),
        ("", "accent", "line", joined),
    ]
    curves = [
        ChartCurve(name, colour, factor * x, y, kind=kind, is_strong=False)
        for name, colour, kind, found in points
        if found
        for x, y in [np.array(found, dtype=float).T]
    ]
    listed = "; ".join(
        f"rank {entry.label}, {show_gib(peak)}, {vertical.number(height)}{vertical.unit.format('')}"
        for peak, height, entry in front
    )
    chart = Chart(
        unit=vertical.head(board.file.sample_unit),
        axis=Axis(*limits(factor * np.array([peak for peak, _, _ in shown]), 0.08), f"{unit} of peak memory"),
        curves=curves,
        top=1.08 * max(float(np.nanmax(curve.y)) for curve in curves) or 1.0,
        told=f"{vertical.noun.capitalize()} against peak memory. On the front: {listed}.",
        notes=[Note(factor * peak, height, entry.label, "accent") for peak, height, entry in front],
        height=280,
    )
    return PagePicture(vertical.title, [chart])
