"""Ranks the points of a study.

A pure function of a study's file and the rows of its trials: every figure can be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from wellfed.command_line import command
from wellfed.errors import ConfigError
from wellfed.study import repeats
from wellfed.study.objective import Objective
from wellfed.study.points.grid import GridPoint, baselines_of
from wellfed.study.ranking.board_entry import ORDER, Entry, EntryStatus, Leaderboard, pending
from wellfed.study.rows import Row, Rows
from wellfed.study.study_files import SearchFile, SweepFile, load
from wellfed.study.trial_end import why_of
from wellfed.units import counted, show_percent

_MEANS = ("samples_per_s", "ceiling_samples_per_s", "readiness_frac", "energy_per_sample_j", "util_pct")
"""Figures of a point that are means over its runs; of its memory the highest counts."""


def board_of(folder: Path) -> Leaderboard:
    """Returns the leaderboard of a folder of a sweep or a search.

    Raises:
        ConfigError: its files can't be read, or are not those of a study.
    """
    return leaderboard(*load(folder))


def leaderboard(file: SweepFile | SearchFile, found: Rows) -> Leaderboard:
    """Returns entries and ranks of a study as it stands.

    An entry's score is the mean over its trial and the runs that confirmed it with the same code. Its 95 % interval is
    that of `repeats.mean_with_interval`. The first entry by score leads a group. Each next entry whose interval
    overlaps the leader's has the leader's rank, and the first that does not leads the next group. Entries of one rank
    can't be told apart from their leader; neighbours of two ranks need not differ.

    Whole trainings share a rank if their values are equal. Pruned ones follow without a rank, the longest first. Every
    point of a grid has an entry, and rows of earlier grids are left out.
    """
    objective = file.ranked_by
    points = file.points if file.ids else [_point_of(file, row) for row in found.latest.values()]
    counted_rows = {point.id: _counted(point, found, objective) for point in points}
    runs = ([_run(row, objective) for row in rows] for rows in counted_rows.values())
    noise = repeats.pooled_noise(runs) if objective.is_ratio else None
    entries = [_entry(point, found, counted_rows[point.id], objective, noise) for point in points]
    good = {entry.point: objective.goodness(entry.score) for entry in entries if entry.score is not None}
    in_order = sorted((entry for entry in entries if entry.point in good), key=lambda entry: -good[entry.point])
    ranked = _compared(_ranked(in_order, objective), good) if objective.is_ratio else _placed(in_order)
    rest = [entry for entry in entries if entry.score is None]
    of_search = isinstance(file, SearchFile)
    rest.sort(key=lambda entry: (ORDER.index(entry.state if of_search else entry.status), -entry.row.validations))
    notes = (*_notes_on_code(file, ranked), *_notes(file, ranked, noise))
    return Leaderboard(file, (*ranked, *rest), notes, noise)


def _notes_on_code(file: SearchFile | SweepFile, ranked: Sequence[Entry]) -> list[str]:
    """Returns a note if ranked entries ran with another version of the code than the last command."""
    codes = {entry.row.code for entry in ranked}
    listed = f"{'; '.join(sorted(codes))}; the last command had {file.code}"
    return [f"Trials ran with other versions of the code: {listed}."] if codes - {file.code} else []


def _point_of(file: SearchFile | SweepFile, row: Row) -> GridPoint:
    typed = dict(text.partition("=")[::2] for text in row.overrides)
    return GridPoint(row.point, {axis: typed.get(axis, "") for axis in file.space}, row.overrides)


def _counted(point: GridPoint, found: Rows, objective: Objective) -> list[Row]:
    """Returns the rows whose figures are averaged: the trial's, if it has a figure, then those that confirm it."""
    trial = found.latest.get(point.id)
    if trial is None or trial.status != "ok" or objective(trial) is None:
        return []
    return [trial, *(row for row in found.confirms(point.id) if row.status == "ok" and objective(row) is not None)]


def _run(row: Row, objective: Objective) -> repeats.MeasuredRun:
    figure = objective(row)
    assert figure is not None
    if row.ci95 is None or not objective.is_interval_known:
        return repeats.MeasuredRun(figure, None)
    half = max(row.ci95[1] - figure, figure - row.ci95[0])
    return repeats.MeasuredRun(figure, half if math.isfinite(half) else None)


def _entry(
    point: GridPoint, found: Rows, rows: Sequence[Row], objective: Objective, noise: repeats.Noise | None
) -> Entry:
    """Returns an entry without its rank; ``rows`` are those that count."""
    entry, trial = pending(point), found.latest.get(point.id)
    if trial is None:
        return entry
    entry = replace(entry, status=trial.status, row=trial)
    if trial.outcome == "pruned":
        why = f"ended after {counted(trial.validations, 'validation')}, {counted(trial.trained_steps, 'step')}"
        return replace(entry, status="pruned", why=why)
    if not rows:
        return replace(entry, why=_why_unranked(trial, objective))

    def mean(name: str) -> float | None:
        known = [figure for row in rows if (figure := getattr(row, name)) is not None]
        return fmean(known) if known else None

    score, ci95 = repeats.mean_with_interval([_run(row, objective) for row in rows], noise)
    means: dict[str, Any] = {name: mean(name) for name in _MEANS}
    peak = max((row.peak_memory_gib for row in rows if row.peak_memory_gib is not None), default=None)
    status: EntryStatus = trial.status if objective.is_ratio else "complete"
    row = replace(trial, peak_memory_gib=peak, **means)
    return replace(entry, status=status, row=row, score=score, ci95=ci95, runs=len(rows), why="")


def _why_unranked(trial: Row, objective: Objective) -> str:
    if trial.error:
        return why_of(trial.error, trial.folder)
    if trial.status == "ok":
        return f"ended well, but without {objective.a_noun}: {objective.missing}"
    return f"exit code {trial.exit_code}"


def _ranked(in_order: Sequence[Entry], objective: Objective) -> list[Entry]:
    ranked: list[Entry] = []
    leader = 0
    """Index of the first entry of the group."""
    for place, entry in enumerate(in_order):
        if entry.ci95 is None:
            ranked.append(replace(entry, rank=place + 1, tie="?"))
            continue
        led_by = ranked[leader].ci95 if ranked else None
        if led_by is not None and max(map(objective.goodness, entry.ci95)) >= min(map(objective.goodness, led_by)):
            ranked[leader] = replace(ranked[leader], tie="=")
            ranked.append(replace(entry, rank=ranked[leader].rank, tie="="))
        else:
            leader = place
            ranked.append(replace(entry, rank=place + 1))
    return ranked


def _compared(ranked: Sequence[Entry], good: Mapping[str, float]) -> list[Entry]:
    """Returns the entries with the figures that compare them to the best and to their baselines."""
    baselines = baselines_of({entry.point: entry.values for entry in ranked})
    halves = {entry.point: _relative_half(entry) for entry in ranked}
    compared = []
    for entry in ranked:
        mine, baseline = good[entry.point], baselines.get(entry.point)
        more: dict[str, Any] = {"of_best": mine / good[ranked[0].point]}
        if baseline is not None:
            factor, own, its = mine / good[baseline], halves[entry.point], halves[baseline]
            more["of_baseline"] = factor
            if baseline != entry.point and own is not None and its is not None:
                width = math.exp(math.hypot(own, its))
                more["of_baseline_ci95"] = (factor / width, factor * width)
        compared.append(replace(entry, **more))
    return compared


def _relative_half(entry: Entry) -> float | None:
    """Returns half of the 95 % interval of the score, over the score; None for a point that was measured once.

    Its trial may have run under other conditions: first, on a cold page cache, or beside trials on other GPUs.
    """
    if entry.ci95 is None or not entry.score or entry.runs < 2:
        return None
    return (entry.ci95[1] - entry.ci95[0]) / 2 / entry.score


def _placed(in_order: Sequence[Entry]) -> list[Entry]:
    """Returns whole trainings with their ranks; equal values share one."""
    ranked: list[Entry] = []
    for place, entry in enumerate(in_order, start=1):
        is_tied = bool(ranked) and ranked[-1].score == entry.score
        ranked.append(replace(entry, rank=ranked[-1].rank if is_tied else place))
    return ranked


def _notes(file: SearchFile | SweepFile, ranked: Sequence[Entry], noise: repeats.Noise | None) -> list[str]:
    objective = file.ranked_by
    if not objective.is_ratio:
        if len(ranked) < 2 or "seed" in file.space:
            return []
        return [
            "One training a point: how much the metric differs between seeds is not known. Train the best again with "
            "other seeds before a small difference is believed."
        ]
    notes = []
    if noise is not None:
        notes.append(
            f"Between runs of the same settings the {objective.noun} differs by {show_percent(noise.relative_sd)} "
            f"(standard deviation, {counted(noise.degrees, 'degree')} of freedom)."
        )
    elif ranked:
        notes.append("No point was measured twice: noise between runs is not known.")
    if any(entry.tie == "?" for entry in ranked) and objective.is_interval_known:
        notes.append("A rank with '?' has no interval: too few steps were measured to tell it from its neighbours.")
    return notes


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
