"""Ranks the points of a sweep and tells which knob mattered.

A pure function of ``sweep.json`` and ``ledger.jsonl``: every figure can be computed again from the rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal, get_args

from wellfed.record import Status, plain
from wellfed.study.sweep import repeats
from wellfed.study.sweep.grid import GridPoint, SweepFile
from wellfed.study.sweep.knob_effects import Effects, knob_effects
from wellfed.study.sweep.ledger import Read, Row
from wellfed.study.sweep.objective import OBJECTIVES, Objective
from wellfed.study.sweep.rows import why_of
from wellfed.units import counted, show_percent

EntryStatus = Literal[Status, "pending"]
_ORDER = ("ok", "oom", "infeasible", "invalid", "timeout", "failed", "killed", "interrupted", "running", "pending")
"""Of entries without a rank: what the settings caused before what happened to them."""
BASELINE = "baseline"
"""The option of the group ``loader`` that others are compared with: torch's DataLoader as it comes."""
_OF_LAST_TRIAL = (
    *("peak_memory_gib", "predicted_peak_gib", "seconds", "attempt", "error", "exit_code"),
    *("stderr", "folder", "started_at", "device", "code", "host", "machine"),
)
"""What an entry has from the row of its last trial as it is."""


@dataclass(frozen=True)
class Entry:
    """One point. Figures are None where they were not measured; those of several runs are means over them."""

    point: str
    values: Mapping[str, str]
    """Axis -> value, as typed."""
    overrides: tuple[str, ...]
    status: EntryStatus
    """Of its last trial; ``pending``: none has ended yet."""
    rank: int | None = None
    """1 = best. Entries of one rank can't be told apart; None without a figure that ranks."""
    tie: Literal["", "=", "?"] = ""
    """``=``: shares its rank; ``?``: nothing is known of its noise, so the rank is its place and no more."""
    score: float | None = None
    """The figure of the sweep's objective, which ranks."""
    ci95: tuple[float, float] | None = None
    """Of the score."""
    samples_per_s: float | None = None
    runs: int = 0
    """Measurements that the score is the mean of: the trial, and those that confirm it."""
    of_best: float | None = None
    """How near it comes to the best score, 0..1: their ratio, turned so that 1 is the best."""
    of_baseline: float | None = None
    """How many times better it is than the point that has ``loader=baseline`` and equals this one in all else."""
    of_baseline_ci95: tuple[float, float] | None = None
    """None: one of the two has no interval, or this is that point."""
    readiness_frac: float | None = None
    ceiling_frac: float | None = None
    """Rate over the rate of the same steps on batches that are on the device."""
    peak_memory_gib: float | None = None
    """The highest of its runs."""
    energy_per_sample_j: float | None = None
    predicted_peak_gib: float | None = None
    util_pct: float | None = None
    seconds: float | None = None
    """Of the last trial, from the start of its process to its end."""
    attempt: int = 0
    """Trials so far."""
    confirms_failed: tuple[str, ...] = ()
    """Statuses of the runs that should have confirmed it and gave no score."""
    on_front: bool = False
    """No other point is as good with less memory, or better with as little (`Objective.beside_memory`)."""
    marks: tuple[str, ...] = ()
    """What sets it apart from most others: another version of the code, another device or machine."""
    why: str = ""
    """Why it has no rank, in a line; empty with one."""
    error: Mapping[str, Any] | None = None
    exit_code: int | None = None
    stderr: tuple[str, ...] = ()
    folder: str = ""
    """Of its last trial, within the sweep's; empty where none was started."""
    started_at: str = ""
    """UTC."""
    device: str = ""
    code: str = ""
    host: str = ""
    machine: str = ""

    @property
    def label(self) -> str:
        """The rank for show: ``1``, ``1=``, ``2?``; empty without one."""
        return "" if self.rank is None else f"{self.rank}{self.tie}"


@dataclass(frozen=True)
class Leaderboard:
    """The entries in order, one for each point of the grid that was asked for last."""

    sweep: SweepFile
    entries: tuple[Entry, ...]
    effects: Effects
    noise: repeats.Noise | None
    """Between runs of the same settings; None as long as nothing was measured twice."""
    notes: tuple[str, ...]
    """What a reader of the figures must know."""

    @property
    def objective(self) -> Objective:
        """What ranks."""
        return OBJECTIVES[self.sweep.objective]

    @property
    def ranked(self) -> list[Entry]:
        """Those that have a score, the best first."""
        return [entry for entry in self.entries if entry.rank is not None]

    @property
    def unranked(self) -> list[Entry]:
        """Those that have ended without a score."""
        return [entry for entry in self.entries if entry.rank is None and entry.status != "pending"]

    @property
    def counts(self) -> dict[str, int]:
        """Status -> points."""
        found = Counter(entry.status for entry in self.entries)
        return {status: found[status] for status in sorted(found, key=_ORDER.index)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON can hold it."""
        found = asdict(self)
        return {**plain({**found.pop("sweep"), **found}), "counts": self.counts}


def leaderboard(sweep: SweepFile, found: Read) -> Leaderboard:
    """Entries, ranks and effects of a sweep as it stands.

    An entry's score is the mean over its last trial and the runs that confirmed it with the same code on the same
    device; its 95 % interval is `repeats.mean_with_interval`'s. Entries are sorted by score, but none that was measured
    once stands before one that was better when each was measured once, and has been measured again since: a machine
    that slows down meanwhile slows only that one. The first leads a group; each next entry whose interval overlaps the
    leader's has the leader's rank, and the first that does not leads the next group. So entries of one rank are not
    told apart from their leader; neighbours of two ranks need not differ.
    """
    objective, points = OBJECTIVES[sweep.objective], sweep.points
    counted_rows = {point.id: _counted(point, found, objective) for point in points}
    noise = repeats.pooled_noise([_run(row, objective) for row in rows] for rows in counted_rows.values())
    entries = [_entry(point, found, counted_rows[point.id], objective, noise) for point in points]
    good = {entry.point: objective.goodness(entry.score) for entry in entries if entry.score is not None}
    first = {point: objective.goodness(_run(rows[0], objective).figure) for point, rows in counted_rows.items() if rows}
    rated = _compared(_ranked(_in_order(entries, good, first), objective), good, objective)
    rated, apart = _marked(rated)
    rest = sorted((entry for entry in entries if entry.score is None), key=lambda entry: _ORDER.index(entry.status))
    scores = [entry.score or 0.0 for entry in rated]
    is_all_tied = len(rated) > 1 and all((entry.rank, entry.tie) == (1, "=") for entry in rated)
    return Leaderboard(
        sweep=sweep,
        entries=(*rated, *rest),
        effects=knob_effects(
            [entry.values for entry in rated], scores, list(sweep.axes), objective, is_all_tied=is_all_tied
        ),
        noise=noise,
        notes=(*apart, *_notes([*rated, *rest], objective, noise, found)),
    )


def _counted(point: GridPoint, found: Read, objective: Objective) -> list[Row]:
    """The rows whose figures are averaged: the last trial's, then those that confirm it. Empty if that one has none."""
    trial = found.latest().get(point.id)
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
    point: GridPoint, found: Read, rows: Sequence[Row], objective: Objective, noise: repeats.Noise | None
) -> Entry:
    """An entry without its rank; ``rows`` are those that count."""
    entry = Entry(point.id, point.values, point.overrides, "pending", why="no trial has ended yet")
    trial = found.latest().get(point.id)
    if trial is None:
        return entry
    status = trial.status if trial.status in get_args(Status) else "failed"
    entry = replace(entry, status=status, **{name: getattr(trial, name) for name in _OF_LAST_TRIAL})
    if not rows:
        return replace(entry, why=_why_unranked(trial, objective))

    def mean(name: str) -> float | None:
        known = [figure for row in rows if (figure := getattr(row, name)) is not None]
        return fmean(known) if known else None

    score, ci95 = repeats.mean_with_interval([_run(row, objective) for row in rows], noise)
    rate, ceiling = mean("samples_per_s"), mean("ceiling_samples_per_s")
    return replace(
        entry,
        score=score,
        ci95=ci95,
        samples_per_s=rate,
        runs=len(rows),
        readiness_frac=mean("readiness_frac"),
        ceiling_frac=rate / ceiling if rate and ceiling else None,
        peak_memory_gib=max((row.peak_memory_gib for row in rows if row.peak_memory_gib is not None), default=None),
        energy_per_sample_j=mean("energy_per_sample_j"),
        util_pct=mean("util_pct"),
        confirms_failed=tuple(
            row.status if row.status != "ok" else f"ok, but without {objective.a_noun}"
            for row in found.confirms(point.id)
            if row.status != "ok" or objective(row) is None
        ),
        why="",
    )


def _why_unranked(trial: Row, objective: Objective) -> str:
    if trial.error:
        return why_of(trial.error, trial.folder)
    if trial.status == "ok":
        return f"ended well, but without {objective.a_noun}: {objective.missing}"
    if trial.exit_code is None:
        return "nothing is known of its end"
    return f"ended by signal {-trial.exit_code}" if trial.exit_code < 0 else f"exit code {trial.exit_code}"


def _in_order(entries: Sequence[Entry], good: Mapping[str, float], first: Mapping[str, float]) -> list[Entry]:
    """Those that have a score, as `leaderboard` sorts them: by how ``good`` each is, and was in its ``first`` trial."""
    rated = sorted((entry for entry in entries if entry.point in good), key=lambda entry: -good[entry.point])
    order = [entry for entry in rated if entry.runs > 1]
    for entry in (entry for entry in rated if entry.runs <= 1):
        better_then = [
            at for at, other in enumerate(order, 1) if other.runs > 1 and first[other.point] > first[entry.point]
        ]
        place = max(better_then, default=0)
        while place < len(order) and good[order[place].point] >= good[entry.point]:
            place += 1
        order.insert(place, entry)
    return order


def _ranked(in_order: Sequence[Entry], objective: Objective) -> list[Entry]:
    ranked: list[Entry] = []
    leader = 0
    """Place of the first of the group."""
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


def _compared(ranked: Sequence[Entry], good: Mapping[str, float], objective: Objective) -> list[Entry]:
    """With what compares them to each other."""
    upright = objective.beside_memory
    points = {frozenset(entry.values.items()): entry.point for entry in ranked}
    places = {
        entry.point: (upright.goodness(figure), -entry.peak_memory_gib)
        for entry in ranked
        if (figure := upright(entry)) is not None and entry.peak_memory_gib is not None
    }

    def is_on_front(point: str) -> bool:
        if point not in places:
            return False
        good_there, room = mine = places[point]
        return not any(other != mine and other[0] >= good_there and other[1] >= room for other in places.values())

    halves = {entry.point: _relative_half(entry) for entry in ranked}
    compared = []
    for entry in ranked:
        mine, sister = good[entry.point], points.get(frozenset({**entry.values, "loader": BASELINE}.items()))
        of_baseline = mine / good[sister] if "loader" in entry.values and sister is not None else None
        ci95 = None
        if of_baseline is not None and sister is not None and sister != entry.point:
            own, its = halves[entry.point], halves[sister]
            if own is not None and its is not None:
                width = math.exp(math.hypot(own, its))
                ci95 = (of_baseline / width, of_baseline * width)
        of_best, on_front = mine / good[ranked[0].point], is_on_front(entry.point)
        with_baseline = replace(entry, of_baseline=of_baseline, of_baseline_ci95=ci95)
        compared.append(replace(with_baseline, of_best=of_best, on_front=on_front))
    return compared


def _relative_half(entry: Entry) -> float | None:
    """Half of the 95 % interval of the score, over the score."""
    if entry.ci95 is None or not entry.score:
        return None
    return (entry.ci95[1] - entry.ci95[0]) / 2 / entry.score


def _marked(ranked: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Entries that were measured by other code, on another device or another kind of machine than most are marked, and
    a note says so."""
    marked, notes = list(ranked), []
    for what, nouns in (("code", "versions of the code"), ("device", "devices"), ("machine", "kinds of machines")):
        # Rows of earlier versions tell no machine.
        found = Counter(own for entry in ranked if (own := getattr(entry, what)) or what != "machine")
        if len(found) < 2:
            continue
        usual = found.most_common(1)[0][0]
        marked = [
            entry
            if (own := getattr(entry, what)) == usual or own not in found
            else replace(entry, marks=(*entry.marks, f"{what} {own or 'unknown'}"))
            for entry in marked
        ]
        told = ", ".join(f"{name or 'unknown'} ({counted(number, 'point')})" for name, number in found.most_common())
        notes.append(
            f"The points were measured with {len(found)} {nouns}, and a difference may be theirs: {told}. Marked: "
            "those that were not measured as most were."
        )
    return marked, notes


def _notes(entries: Sequence[Entry], objective: Objective, noise: repeats.Noise | None, found: Read) -> list[str]:
    notes = []
    if noise is not None:
        notes.append(
            f"Between runs of the same settings the {objective.noun} differs by {show_percent(noise.relative_sd)} "
            f"(standard deviation, {counted(noise.degrees, 'degree')} of freedom)."
        )
    elif any(entry.rank is not None for entry in entries):
        notes.append(
            "No point was measured twice: intervals are of one run each and know nothing of noise between runs."
            if objective.is_interval_known
            else f"No point was measured twice, and one run tells no interval of its {objective.noun}."
        )
    if any(entry.tie == "?" for entry in entries) and objective.is_interval_known:
        notes.append("A rank with '?' has no interval: too few steps were measured to tell it from its neighbours.")
    notes += [
        f"{entry.point}: {counted(len(entry.confirms_failed), 'run')} that should have confirmed it gave no "
        f"{objective.noun} ({', '.join(entry.confirms_failed)})."
        for entry in entries
        if entry.confirms_failed
    ]
    silent = sum(entry.status == "ok" and entry.rank is None for entry in entries)
    if silent:
        notes.append(f"{counted(silent, 'point')} ended well without {objective.a_noun}: {objective.missing}.")
    return [*notes, *found.says_left_out((entry.point for entry in entries), "sweep")]
