"""Draws the pictures of a search's page: learning curves, and the metric over each axis."""

from __future__ import annotations

from markupsafe import Markup

from wellfed.explain.pages.picture import ACCENT, INK, picture
from wellfed.study.board.columns import figure_text
from wellfed.study.points.space import Numbers
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.study_files import SearchFile
from wellfed.units import show_text

_ACCENTED = 3
"""Ranks whose curves stand out."""


def pictures(board: Leaderboard) -> tuple[Markup | None, Markup | None]:
    """Returns both pictures as ``<svg>`` elements; None where there is nothing to draw."""
    assert isinstance(board.file, SearchFile)
    return _curves(board, board.file), _axes(board, board.file)


def _curves(board: Leaderboard, file: SearchFile) -> Markup | None:
    """Returns the metric of every trial over its steps; None where no trial has two validations."""
    drawn_ones = [entry for entry in board.entries if len(entry.curve) > 1]
    if not drawn_ones:
        return None
    with picture(8.2, 4.2) as drawn:
        axes = drawn.figure.add_subplot()
        for entry in reversed(drawn_ones):  # the best on top
            steps, values = [point.step for point in entry.curve], [point.value for point in entry.curve]
            stands_out = entry.rank is not None and entry.rank <= _ACCENTED
            colour, width, strength = (ACCENT, 1.8, 1.0) if stands_out else (INK, 0.9, 0.35)
            style = "-" if entry.rank is not None else ":"
            axes.plot(steps, values, style, color=colour, linewidth=width, alpha=strength)
            if entry.status != "complete":
                axes.plot(steps[-1:], values[-1:], "x", color=INK, alpha=0.6, markersize=5)
            if stands_out:
                end = (steps[-1], values[-1])
                axes.annotate(str(entry.rank), end, xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel(show_text(f"val/{file.metric}"))
        axes.locator_params("x", integer=True)
        axes.grid(color=INK, alpha=0.12, linewidth=0.7)
        listed = "; ".join(_first_and_last(entry) for entry in drawn_ones[:_ACCENTED])
        drawn.told = f"{len(drawn_ones)} learning curves over optimizer steps. {show_text(listed)}"
    return drawn.svg


def _first_and_last(entry: Entry) -> str:
    return f"trial {entry.row.trial}: {figure_text(entry.curve[0].value)} to {figure_text(entry.curve[-1].value)}"


def _axes(board: Leaderboard, file: SearchFile) -> Markup | None:
    """Returns the metric over each axis of numbers; None without one, or with fewer than 3 points."""
    numbers = [name for name, axis in file.space.items() if isinstance(axis, Numbers)]
    shown = [entry for entry in (*board.ranked, *board.pruned) if entry.row.value is not None]
    if not numbers or len(shown) < 3:
        return None
    with picture(8.2, 2.6 * ((len(numbers) + 1) // 2)) as drawn:
        for number, name in enumerate(numbers, start=1):
            axis = file.space[name]
            axes = drawn.figure.add_subplot((len(numbers) + 1) // 2, min(2, len(numbers)), number)
            for ranked, mark, colour in ((True, "o", ACCENT), (False, "x", INK)):
                mine = [entry for entry in shown if (entry.rank is not None) is ranked]
                xs, ys = [float(entry.values[name]) for entry in mine], [entry.row.value for entry in mine]
                axes.plot(xs, ys, mark, color=colour, alpha=0.8, markersize=5)  # type: ignore[arg-type]
            if isinstance(axis, Numbers) and axis.is_log:
                axes.set_xscale("log")
            axes.set_xlabel(show_text(name))
            axes.set_ylabel(show_text(f"val/{file.metric}"))
            axes.grid(color=INK, alpha=0.12, linewidth=0.7)
        drawn.told = f"The metric of {len(shown)} trials over {show_text(', '.join(numbers))}."
    return drawn.svg
