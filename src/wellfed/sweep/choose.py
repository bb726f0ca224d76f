"""Which point of a sweep to go on with, and what its record says about the knobs of a group."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from wellfed.errors import ConfigError, Fault
from wellfed.sweep.grid import OF_THE_SWEEP, group_of
from wellfed.sweep.leaderboard import Entry, Leaderboard
from wellfed.units import counted, show_count, show_gib

_LISTED = 5


class Known(NamedTuple):
    """A knob's value in a run that is over, and why it had it."""

    value: Any
    because: str


def chosen(board: Leaderboard, point: str | None = None) -> Entry:
    """The entry of ``point``, or the one with the highest rate.

    Raises:
        ConfigError: no point has a rate, there is no such point, or it has none.
    """
    if point is None:
        if board.ranked:
            return board.ranked[0]
        ended = ", ".join(f"{number} {status}" for status, number in board.counts.items())
        way_out = "python -m wellfed leaderboard shows why; run the sweep again with what they say changed."
        raise ConfigError(
            [Fault(board.name, f"no point has a rate ({ended}), so there is nothing to choose.", way_out)]
        )
    entry = next((entry for entry in board.entries if entry.point == point), None)
    asked = f"--point {point}"
    if entry is None:
        ids = [entry.point for entry in board.entries]
        close = difflib.get_close_matches(point, ids, n=_LISTED, cutoff=0.3) or ids[:_LISTED]
        problem = f"sweep {board.name} has {counted(len(ids), 'point')}, and none is called so."
        raise ConfigError([Fault(asked, problem, f"Near it: {', '.join(close)}.")])
    if entry.rank is None:
        message = "" if entry.error is None else f": {str(entry.error.get('message', '')).rstrip('.')}"
        best = f"Leave --point out for the fastest, {board.ranked[0].point}." if board.ranked else "No point has one."
        raise ConfigError([Fault(asked, f"has no rate; it is {entry.status}{message}.", best)])
    return entry


def told_of_tie(board: Leaderboard, entry: Entry) -> str | None:
    """A sentence about those that can't be told apart from it, the one that needs least memory among them; None if
    there are none."""
    tied = [other for other in board.ranked if other.rank == entry.rank and other.point != entry.point]
    if not tied or entry.tie != "=":
        return None
    told = f"{counted(len(tied), 'other point')} can't be told apart from it (rank {entry.label})"
    known = [(other.peak_memory_gib, other.point) for other in tied if other.peak_memory_gib is not None]
    least_gib, least = min(known, default=(None, ""))
    if least_gib is None or entry.peak_memory_gib is None or least_gib >= entry.peak_memory_gib:
        return f"{told}; none is known to need less memory."
    needs = f"{show_gib(least_gib)} instead of {show_gib(entry.peak_memory_gib)}"
    return f"{told}; {least} needs the least memory of them, {needs}: --point {least}."


def known_of(record: Mapping[str, Any], group: str, knobs: Sequence[str]) -> dict[str, Known]:
    """The knobs of a group as a finished run had them: planned where its plan decided them, else as configured; those
    that neither tells are left out."""
    plan, config = record.get("plan") or {}, (record.get("config") or {}).get(group) or {}
    known = {}
    for knob in knobs:
        planned = plan.get(f"{group}.{knob}")
        if planned is not None:
            known[knob] = Known(planned["value"], f"{planned['source']}: {planned['because']}")
        elif knob in config:
            known[knob] = Known(config[knob], "as configured in the sweep")
    return known


def typed_besides(entry: Entry, groups: Sequence[str]) -> list[str]:
    """Its overrides that are about other groups: what has to be typed beside the options of ``groups``."""
    return [text for text in entry.overrides if group_of(text) not in (*groups, *OF_THE_SWEEP)]


def in_words(board: Leaderboard, entry: Entry) -> str:
    """Its rate, interval and place."""
    assert entry.samples_per_s is not None
    rate = f"{show_count(entry.samples_per_s)} {board.sample_unit}/s"
    if entry.ci95 is not None:
        rate += f" (95 % interval {show_count(entry.ci95[0])} to {show_count(entry.ci95[1])})"
    return f"{rate}, rank {entry.label} of {len(board.ranked)}"
