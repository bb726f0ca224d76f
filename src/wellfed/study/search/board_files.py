"""Writes ``leaderboard.csv`` of a search for programs, ``leaderboard.md`` and ``leaderboard.html`` for people."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from markupsafe import Markup

from wellfed.command_line import command
from wellfed.explain.pages.html_page import fill_in
from wellfed.explain.pages.markdown_text import code_span, plain_line
from wellfed.explain.pages.picture import ACCENT, INK, no_pictures, picture
from wellfed.record import write_atomically
from wellfed.study.search.board_columns import columns, figure_text
from wellfed.study.search.search_board import SearchBoard, TrialEntry
from wellfed.study.search.space import Numbers, show_value
from wellfed.units import show_text, spreadsheet_cell

NAMES = ("leaderboard.csv", "leaderboard.md", "leaderboard.html")
CSV_COLUMNS = (
    *("rank", "trial", "point", "state", "status", "value", "value_step", "last_value", "validations"),
    *("trained_steps", "samples_per_s", "peak_memory_gib", "seconds", "attempt", "folder"),
)
"""Before the axes; behind them come ``overrides`` and ``why``."""
_ACCENTED = 3
"""Ranks whose curves stand out."""


def write(folder: Path, board: SearchBoard) -> list[Path]:
    """The three files, each replaced as a whole.

    Raises:
        OSError: one can't be written; it is as it was.
    """
    texts = dict(zip(NAMES, (to_csv(board), to_markdown(board), to_html(board)), strict=True))
    for name, text in texts.items():
        # A lone surrogate, as a path on disk may hold, is no UTF-8.
        write_atomically(folder / name, text.encode("utf-8", errors="replace").decode("utf-8"))
    return [folder / name for name in texts]


def to_csv(board: SearchBoard) -> str:
    """A row a point; numbers unrounded, empty where nothing is known; ``overrides`` can be pasted into a shell."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(spreadsheet_cell, [*CSV_COLUMNS, *board.search.space, "overrides", "why"]))
    for entry in board.entries:
        known = {**({} if entry.row is None else vars(entry.row)), **vars(entry), "status": entry.status}
        cells = [known.get(name, "") for name in CSV_COLUMNS]
        texts = [*entry.values.values(), shlex.join(entry.overrides), " ".join(entry.why.split())]
        writer.writerow(map(spreadsheet_cell, [*cells, *texts]))
    return stream.getvalue()


def to_markdown(board: SearchBoard) -> str:
    """The same for a page in a repository."""
    text = _page("board.md.j2", board, autoescape=False, filters={"code": code_span, "plain": plain_line})
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def to_html(board: SearchBoard) -> str:
    """One file, with the learning curves. Every text of the user's is escaped."""
    curves, axes = (None, None) if no_pictures() else (_curves(board), _axes(board))
    return _page("board.html.j2", board, autoescape=True, curves=curves, axes=axes)


def _page(
    template: str,
    board: SearchBoard,
    *,
    autoescape: bool,
    filters: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
    **more: Any,
) -> str:
    values = {
        "board": board,
        "search": board.search,
        "columns": columns(board),
        "again": again(board),
        "figure": figure_text,
        "show_value": show_value,
        **more,
    }
    return fill_in(Path(__file__).with_name(template), values, autoescape=autoescape, filters=filters)


def again(board: SearchBoard) -> list[str]:
    """The words of the command that trains the best once more; none without one."""
    best = board.best
    return [] if best is None else [*command("train").split(), *board.search.flags, *best.overrides]


def _curves(board: SearchBoard) -> Markup | None:
    """An ``<svg>`` element with the metric of every trial over its steps; None where no trial has two validations."""
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
            if entry.state != "complete":
                axes.plot(steps[-1:], values[-1:], "x", color=INK, alpha=0.6, markersize=5)
            if stands_out:
                place = (steps[-1], values[-1])
                axes.annotate(str(entry.rank), place, xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel(show_text(f"val/{board.search.metric}"))
        axes.locator_params("x", integer=True)
        axes.grid(color=INK, alpha=0.12, linewidth=0.7)
        told = "; ".join(_told(entry) for entry in drawn_ones[:_ACCENTED])
        drawn.told = f"{len(drawn_ones)} learning curves over optimizer steps. {show_text(told)}"
    return drawn.svg


def _told(entry: TrialEntry) -> str:
    return f"trial {entry.trial}: {figure_text(entry.curve[0].value)} to {figure_text(entry.curve[-1].value)}"


def _axes(board: SearchBoard) -> Markup | None:
    """An ``<svg>`` element with the metric over each axis of numbers; None without one, or with fewer than 3 points."""
    numbers = [name for name, axis in board.search.space.items() if isinstance(axis, Numbers)]
    shown = [entry for entry in (*board.ranked, *board.pruned) if entry.value is not None]
    if not numbers or len(shown) < 3:
        return None
    with picture(8.2, 2.6 * ((len(numbers) + 1) // 2)) as drawn:
        for place, name in enumerate(numbers, start=1):
            axis = board.search.space[name]
            axes = drawn.figure.add_subplot((len(numbers) + 1) // 2, min(2, len(numbers)), place)
            for ranked, mark, colour in ((True, "o", ACCENT), (False, "x", INK)):
                mine = [entry for entry in shown if (entry.rank is not None) is ranked]
                xs, ys = [float(entry.values[name]) for entry in mine], [entry.value for entry in mine]
                axes.plot(xs, ys, mark, color=colour, alpha=0.8, markersize=5)  # type: ignore[arg-type]
            if isinstance(axis, Numbers) and axis.is_log:
                axes.set_xscale("log")
            axes.set_xlabel(show_text(name))
            axes.set_ylabel(show_text(f"val/{board.search.metric}"))
            axes.grid(color=INK, alpha=0.12, linewidth=0.7)
        drawn.told = f"The metric of {len(shown)} trials over {show_text(', '.join(numbers))}."
    return drawn.svg
