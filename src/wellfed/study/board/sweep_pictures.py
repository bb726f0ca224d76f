"""Makes the figures of a sweep's page: heat maps of two knobs, and the score against memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from markupsafe import Markup

from wellfed.explain.pages.picture import ACCENT, INK, no_pictures, picture
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.study_files import SweepFile
from wellfed.units import show_gib

MOST_MAPS = 6
"""Pairs of axes that get a heat map."""


@dataclass(frozen=True)
class HeatCell:
    """The points that share two values."""

    mean: float | None
    """Mean of `Entry.of_best`; None where none of them has one."""
    heat: float
    """0..1, from the worst entry to the best."""
    others: str
    """Statuses of the points without a score."""


@dataclass(frozen=True)
class HeatMap:
    """Two axes against each other, the longer one downwards."""

    pair: tuple[str, str]
    down: str
    across: str
    cells: Mapping[tuple[str, str], HeatCell]


def figures(board: Leaderboard) -> dict[str, Any]:
    """Returns what the template of the page shows beside the table."""
    ranked, front = board.ranked, [entry for entry in board.ranked if entry.on_front]
    front.sort(key=lambda entry: entry.peak_memory_gib or 0)
    return {
        "vertical": board.objective.against_memory,
        "ranked": ranked,
        "tied": sum(entry.rank == 1 for entry in ranked) - 1,
        "top": max((figure for entry in ranked for figure in (entry.score or 0, *(entry.ci95 or ()))), default=0),
        "pending": [entry for entry in board.entries if entry.status == "pending"],
        "effects": board.effects,
        "maps": _heat_maps(board),
        "most_maps": MOST_MAPS,
        "picture": None if no_pictures() else _memory_picture(board),
        "front": front,
    }


def _heat_maps(board: Leaderboard) -> list[HeatMap]:
    """Returns the maps of all pairs of axes, those that mattered most first."""
    file = board.file
    if not board.ranked or board.effects is None or not isinstance(file, SweepFile):
        return []
    share = board.effects.shares
    varied = [axis for axis, values in file.axes.items() if len(values) > 1]
    pairs = sorted(combinations(varied, 2), key=lambda pair: -sum(share.get(axis, 0) for axis in pair))
    lowest = min(entry.of_best or 0.0 for entry in board.ranked)
    maps = []
    for pair in pairs:
        down, across = sorted(pair, key=lambda axis: -len(file.axes[axis]))
        entries: dict[tuple[str, str], list[Entry]] = {}
        for entry in board.entries:
            entries.setdefault((entry.values[down], entry.values[across]), []).append(entry)
        maps.append(HeatMap(pair, down, across, {pair: _cell(both, lowest) for pair, both in entries.items()}))
    return maps


def _cell(entries: Sequence[Entry], lowest: float) -> HeatCell:
    known = [entry.of_best for entry in entries if entry.of_best is not None]
    others = Counter(entry.status for entry in entries if entry.of_best is None)
    listed = ", ".join(
        status if number == len(entries) == 1 else f"{number} {status}" for status, number in others.items()
    )
    mean = fmean(known) if known else None
    return HeatCell(mean, 1.0 if mean is None or lowest == 1 else (mean - lowest) / (1 - lowest), listed)


def _memory_picture(board: Leaderboard) -> Markup | None:
    """Returns an ``<svg>`` element of all points with both figures; None if no point has both.

    Intervals are bars; the Pareto front is joined and labelled with ranks. The picture holds no text of the user's, is
    coloured by ``currentColor`` and ``var(--accent)``, and lists the front as text.
    """
    vertical = board.objective.against_memory
    shown = [
        (entry.peak_memory_gib, height, entry)
        for entry in board.ranked
        if entry.peak_memory_gib is not None and (height := vertical(entry)) is not None
    ]
    if not shown:
        return None
    from matplotlib.ticker import StrMethodFormatter

    # In GiB from the least to the most; small ones, as on a CPU, in MiB.
    factor, unit = (1.0, "GiB") if max(peak for peak, _, _ in shown) >= 1 else (1024.0, "MiB")
    with picture(8.2, 4.4) as drawn:
        axes = drawn.figure.add_subplot()
        for peak, height, entry in shown:
            x = factor * peak
            if entry.ci95 is not None and vertical is board.objective:
                axes.plot([x, x], entry.ci95, color=INK, alpha=0.45, linewidth=1, zorder=1)
            if not entry.on_front:
                axes.plot([x], [height], "o", color=INK, markerfacecolor="none", markersize=6, zorder=2)
        front = sorted(((peak, height, entry) for peak, height, entry in shown if entry.on_front), key=lambda at: at[0])
        xs, ys = [factor * peak for peak, _, _ in front], [height for _, height, _ in front]
        # A step: between two points of the front nothing was measured.
        axes.step(xs, ys, where="post", color=ACCENT, linewidth=1.2, linestyle="--", zorder=2)
        axes.plot(xs, ys, "D", color=ACCENT, markersize=8, zorder=3)
        for x, y, (_, _, entry) in zip(xs, ys, front, strict=True):
            axes.annotate(
                entry.label, (x, y), xytext=(-9, 5), textcoords="offset points", ha="right", weight="bold", zorder=4
            )
        axes.set_ylim(bottom=0)
        axes.margins(x=0.08)
        axes.set_xlabel(f"peak memory, {unit}")
        axes.set_ylabel(f"{vertical.noun}, {vertical.unit.format(1)}")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.grid(color=INK, alpha=0.12, linewidth=0.7)
        axes.set_axisbelow(True)
        points = "; ".join(
            f"rank {entry.label}, {show_gib(peak)}, {vertical.number(height)}{vertical.unit.format('')}"
            for peak, height, entry in front
        )
        drawn.told = f"{vertical.noun.capitalize()} against peak memory. On the front: {points}."
    return drawn.svg
