"""Writes ``leaderboard.html`` from its template, ``leaderboard.html.j2``: figures here, words and marks there."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from wellfed.sweep.leaderboard_columns import columns, interval
from wellfed.sweep.memory_picture import memory_picture
from wellfed.sweep.ranking import Entry, Leaderboard
from wellfed.units import counted, show_gib, show_percent

MOST_MAPS = 6
"""Pairs of axes that get a heat map."""


@dataclass(frozen=True)
class HeatCell:
    """The points that share two values."""

    mean: float | None
    """Of `Entry.of_best`; None where none of them has one."""
    heat: float
    """0..1, from the worst entry to the best."""
    others: str
    """What became of those without."""


@dataclass(frozen=True)
class HeatMap:
    """Two axes against each other, the longer one down."""

    pair: tuple[str, str]
    down: str
    across: str
    cells: Mapping[tuple[str, str], HeatCell]


def to_html(board: Leaderboard) -> str:
    """The page. Every text of the user's is escaped."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(shell=shlex.join, counted=counted, percent=show_percent, gib=show_gib)
    ranked, front = board.ranked, [entry for entry in board.ranked if entry.on_front]
    front.sort(key=lambda entry: entry.peak_memory_gib or 0)
    page: str = pages.get_template("leaderboard.html.j2").render(
        board=board,
        objective=board.objective,
        upright=board.objective.beside_memory,
        ranked=ranked,
        tied=sum(entry.rank == 1 for entry in ranked) - 1,
        top=max((figure for entry in ranked for figure in (entry.score or 0, *(entry.ci95 or ()))), default=0),
        pending=[entry for entry in board.entries if entry.status == "pending"],
        columns=columns(board),
        interval=interval,
        effects=board.effects,
        maps=_heat_maps(board),
        most_maps=MOST_MAPS,
        picture=_picture(board, front),
        front=front,
    )
    return page


def _heat_maps(board: Leaderboard) -> list[HeatMap]:
    """Of all pairs of axes, those that mattered most first."""
    if not board.ranked:
        return []
    share = board.effects.shares
    varied = [axis for axis, values in board.sweep.axes.items() if len(values) > 1]
    pairs = sorted(combinations(varied, 2), key=lambda pair: -sum(share.get(axis, 0) for axis in pair))
    lowest = min(entry.of_best or 0.0 for entry in board.ranked)
    maps = []
    for pair in pairs:
        down, across = sorted(pair, key=lambda axis: -len(board.sweep.axes[axis]))
        entries: dict[tuple[str, str], list[Entry]] = {}
        for entry in board.entries:
            entries.setdefault((entry.values[down], entry.values[across]), []).append(entry)
        maps.append(HeatMap(pair, down, across, {place: _cell(there, lowest) for place, there in entries.items()}))
    return maps


def _cell(entries: Sequence[Entry], lowest: float) -> HeatCell:
    known = [entry.of_best for entry in entries if entry.of_best is not None]
    others = Counter(entry.status for entry in entries if entry.of_best is None)
    told = ", ".join(
        status if number == len(entries) == 1 else f"{number} {status}" for status, number in others.items()
    )
    mean = fmean(known) if known else None
    return HeatCell(mean, 1.0 if mean is None or lowest == 1 else (mean - lowest) / (1 - lowest), told)


def _picture(board: Leaderboard, front: Sequence[Entry]) -> Markup | None:
    """The drawing, which holds no text of the user's, with its figures in words."""
    picture, upright = memory_picture(board), board.objective.beside_memory
    if picture is None:
        return None
    told = "; ".join(
        f"rank {entry.label}, {show_gib(entry.peak_memory_gib or 0)}, "
        f"{upright.number(upright(entry) or 0)}{upright.unit.format('')}"
        for entry in front
    )
    label = escape(f"{upright.noun.capitalize()} against peak memory. On the front: {told}.")
    return Markup(picture.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))
