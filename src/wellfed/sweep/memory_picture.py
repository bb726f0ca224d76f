"""Draws what a sweep looks for against memory: the one picture of a leaderboard that a table can't be."""

from __future__ import annotations

import io
import re
from typing import Any

from wellfed.sweep.ranking import Leaderboard

_INK, _ACCENT = "#010203", "#040506"
"""Stand-ins that no default of matplotlib uses: the page's own colours take their place, in the dark too."""
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: sharp, found by search, in the page's colour
    "svg.hashsalt": "wellfed",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def memory_picture(board: Leaderboard) -> str | None:
    """An ``<svg>`` element with every point that has both figures, intervals as bars, the Pareto front joined and
    labelled with ranks; None if no point has both.

    It holds no text of the user's, and is coloured by ``currentColor`` and ``var(--accent)``.
    """
    upright = board.objective.beside_memory
    shown = [
        (entry.peak_memory_gib, height, entry)
        for entry in board.ranked
        if entry.peak_memory_gib is not None and (height := upright(entry)) is not None
    ]
    if not shown:
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    # In GiB from the least to the most; small ones, as on a CPU, in MiB.
    factor, unit = (1.0, "GiB") if max(peak for peak, _, _ in shown) >= 1 else (1024.0, "MiB")
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.2, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for peak, height, entry in shown:
            x = factor * peak
            if entry.ci95 is not None and upright is board.objective:
                axes.plot([x, x], entry.ci95, color=_INK, alpha=0.45, linewidth=1, zorder=1)
            if not entry.on_front:
                axes.plot([x], [height], "o", color=_INK, markerfacecolor="none", markersize=6, zorder=2)
        front = sorted(((peak, height, entry) for peak, height, entry in shown if entry.on_front), key=lambda at: at[0])
        xs, ys = [factor * peak for peak, _, _ in front], [height for _, height, _ in front]
        # A step: between two points of the front nothing was measured.
        axes.step(xs, ys, where="post", color=_ACCENT, linewidth=1.2, linestyle="--", zorder=2)
        axes.plot(xs, ys, "D", color=_ACCENT, markersize=8, zorder=3)
        for x, y, (_, _, entry) in zip(xs, ys, front, strict=True):
            axes.annotate(
                entry.label, (x, y), xytext=(-9, 5), textcoords="offset points", ha="right", weight="bold", zorder=4
            )
        axes.set_ylim(bottom=0)
        axes.margins(x=0.08)
        axes.set_xlabel(f"peak memory, {unit}")
        axes.set_ylabel(f"{upright.noun}, {upright.unit.format(1)}")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.grid(color=_INK, alpha=0.12, linewidth=0.7)
        axes.set_axisbelow(True)
        drawn = io.StringIO()
        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=none)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor").replace(_ACCENT, "var(--accent)")
    return re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r' height="[^"]*pt"', "", svg, count=1), count=1)
