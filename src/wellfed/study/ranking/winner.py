"""Picks the point of a sweep to go on with."""

from __future__ import annotations

from wellfed.command_line import command
from wellfed.errors import ConfigError
from wellfed.study.ranking.board_entry import Entry, Leaderboard
from wellfed.study.study_files import SweepFile
from wellfed.units import counted


def chosen(board: Leaderboard, point: str | None = None) -> Entry:
    """Returns the entry of ``point``, or the best.

    Raises:
        ConfigError: no point has a rank, there is no such point, or it has none.
    """
    noun = board.objective.a_noun
    if point is None:
        if board.ranked:
            return board.ranked[0]
        ended = ", ".join(f"{number} {status}" for status, number in board.counts.items())
        problem = f"no point has {noun} ({ended}), so there is nothing to choose."
        way_out = f"{command('leaderboard')} shows why; run the sweep again with what they say changed."
        raise ConfigError.of(board.file.name, problem, way_out)
    entry = next((entry for entry in board.entries if entry.point == point), None)
    asked = f"--point {point}"
    if entry is None:
        problem = f"sweep {board.file.name} has {counted(len(board.entries), 'point')}, and none is called so."
        raise ConfigError.of(asked, problem, f"{command('leaderboard')} lists them.")
    if entry.rank is None:
        why = f": {str(entry.row.error.get('message', '')).rstrip('.')}" if entry.row.error else ""
        if entry.status == "ok":
            why = f", but {board.objective.missing}"
        best = "No point has one."
        if board.ranked:
            best = f"Leave --point out for the {board.objective.best}, {board.ranked[0].point}."
        raise ConfigError.of(asked, f"has no {board.objective.noun}; it is {entry.status}{why}.", best)
    return entry


def tie_text(board: Leaderboard, entry: Entry) -> str | None:
    """Returns a sentence on the points that tie with it, with the one of least memory; None without ties."""
    tied = [other for other in board.ranked if other.rank == entry.rank and other.point != entry.point]
    if not tied or entry.tie != "=":
        return None
    tied_with = f"{counted(len(tied), 'other point')} can't be told apart from it (rank {entry.label})"
    known = [(peak, other.point) for other in [entry, *tied] if (peak := other.row.peak_memory_gib) is not None]
    _, point = min(known, default=(0.0, entry.point))
    return tied_with + ("." if point == entry.point else f"; {point} needs the least memory: --point {point}.")


def _unit(board: Leaderboard) -> str:
    return board.file.sample_unit if isinstance(board.file, SweepFile) else ""


def score_text(board: Leaderboard, entry: Entry) -> str:
    """Returns its score, interval and rank."""
    assert entry.score is not None
    objective = board.objective
    score = objective.show(entry.score, _unit(board))
    if entry.ci95 is not None:
        score += f" (95 % interval {' to '.join(map(objective.number, entry.ci95))})"
    return f"{score}, rank {entry.label} of {len(board.ranked)}"
