"""What a sweep found: an entry for each point of its grid, ranked, and which knob mattered.

A pure function of ``sweep.json`` and ``ledger.jsonl``: every figure can be computed again from the rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal, get_args

from wellfed.record import Status, plain
from wellfed.sweep import repeats
from wellfed.sweep.grid import Point, SweepFile
from wellfed.sweep.knob_effects import Effects, knob_effects
from wellfed.sweep.ledger import Read, Row
from wellfed.units import counted, show_percent

EntryStatus = Literal[Status, "pending"]
_ORDER = ("ok", "oom", "infeasible", "invalid", "timeout", "failed", "killed", "interrupted", "running", "pending")
"""Of entries without a rank: what the settings caused before what happened to them."""
BASELINE = "baseline"
"""The option of the group ``loader`` that others are compared with: torch's DataLoader as it comes."""


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
    """1 = fastest. Entries of one rank can't be told apart; None without a rate."""
    tie: Literal["", "=", "?"] = ""
    """``=``: shares its rank; ``?``: nothing is known of its noise, so the rank is its place and no more."""
    samples_per_s: float | None = None
    ci95: tuple[float, float] | None = None
    runs: int = 0
    """Measurements that the rate is the mean of: the trial, and those that confirm it."""
    of_best: float | None = None
    """Rate over the highest rate."""
    of_baseline: float | None = None
    """Rate over that of the point that has ``loader=baseline`` and equals this one in all else."""
    readiness_frac: float | None = None
    ceiling_frac: float | None = None
    """Rate over the rate of the same steps on batches that are on the device."""
    peak_memory_gib: float | None = None
    """The highest of its runs."""
    predicted_peak_gib: float | None = None
    util_pct: float | None = None
    seconds: float | None = None
    """Of the last trial, from the start of its process to its end."""
    attempt: int = 0
    """Trials so far."""
    confirms_failed: tuple[str, ...] = ()
    """Statuses of the runs that should have confirmed it and gave no rate."""
    on_front: bool = False
    """No other point is as fast with less memory, or faster with as little."""
    marks: tuple[str, ...] = ()
    """What sets its rate apart from most others': another version of the code, another device."""
    error: Mapping[str, Any] | None = None
    exit_code: int | None = None
    stderr: tuple[str, ...] = ()
    folder: str = ""
    """Of its last trial, within the sweep's; empty where none was started."""
    started_at: str = ""
    """UTC."""
    device: str = ""
    code: str = ""

    @property
    def label(self) -> str:
        """The rank for show: ``1``, ``1=``, ``2?``; empty without one."""
        return "" if self.rank is None else f"{self.rank}{self.tie}"


@dataclass(frozen=True)
class Leaderboard:
    """The entries in order, one for each point of the grid that was asked for last."""

    name: str
    workload: str
    sample_unit: str
    machine: str
    code: str
    axes: Mapping[str, tuple[str, ...]]
    fixed: tuple[str, ...]
    flags: tuple[str, ...]
    """Of the command line, where configurations are searched."""
    entries: tuple[Entry, ...]
    effects: Effects
    noise: repeats.Noise | None
    """Between runs of the same settings; None as long as nothing was measured twice."""
    notes: tuple[str, ...]
    """What a reader of the figures must know."""

    @property
    def ranked(self) -> list[Entry]:
        """Those that have a rate, fastest first."""
        return [entry for entry in self.entries if entry.rank is not None]

    @property
    def unranked(self) -> list[Entry]:
        """Those that have ended without a rate."""
        return [entry for entry in self.entries if entry.rank is None and entry.status != "pending"]

    @property
    def counts(self) -> dict[str, int]:
        """Status -> points."""
        found = Counter(entry.status for entry in self.entries)
        return {status: found[status] for status in sorted(found, key=_ORDER.index)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON can hold it."""
        found: dict[str, Any] = plain(asdict(self))
        return {**found, "counts": self.counts}


def leaderboard(sweep: SweepFile, found: Read) -> Leaderboard:
    """Entries, ranks and effects of a sweep as it stands.

    An entry's rate is the mean over its last trial and the runs that confirmed it with the same code on the same
    device; its 95 % interval is `repeats.rate_with_interval`'s. Entries are sorted by rate, but none that was measured
    once stands before one that was faster when each was measured once, and has been measured again since: a machine
    that slows down meanwhile slows only that one. The first leads a group; each next entry whose interval overlaps the
    leader's has the leader's rank, and the first that does not leads the next group. So entries of one rank are not
    told apart from their leader; neighbours of two ranks need not differ.
    """
    points = sweep.points
    noise = repeats.pooled_noise(_runs(rows) for rows in (_counted(point, found) for point in points) if rows)
    first_rates = {point.id: _rate(rows[0]) or 0.0 for point in points if (rows := _counted(point, found))}
    entries = _with_ratios(_ranked([_entry(point, found, noise) for point in points], first_rates))
    entries, apart = _marked(entries)
    rated = [entry for entry in entries if entry.rank is not None]
    rates = [entry.samples_per_s or 0.0 for entry in rated]
    return Leaderboard(
        name=sweep.name,
        workload=sweep.workload,
        sample_unit=sweep.sample_unit,
        machine=sweep.machine,
        code=sweep.code,
        axes=sweep.axes,
        fixed=sweep.fixed,
        flags=sweep.flags,
        entries=tuple(entries),
        effects=knob_effects([entry.values for entry in rated], rates, list(sweep.axes)),
        noise=noise,
        notes=(*apart, *_notes(entries, noise, found, {point.id for point in points})),
    )


def _counted(point: Point, found: Read) -> list[Row]:
    """The rows whose rates are averaged: the last trial's, then those that confirm it. Empty if that trial has none."""
    trial = found.latest().get(point.id)
    if trial is None or trial.status != "ok" or _rate(trial) is None:
        return []
    return [trial, *(row for row in found.confirms(point.id) if row.status == "ok" and _rate(row) is not None)]


def _rate(row: Row) -> float | None:
    rate = row.samples_per_s
    return rate if rate is not None and math.isfinite(rate) and rate > 0 else None


def _runs(rows: Sequence[Row]) -> list[repeats.Run]:
    runs = []
    for row in rows:
        rate = _rate(row)
        assert rate is not None
        half = None if row.ci95 is None else max(row.ci95[1] - rate, rate - row.ci95[0])
        runs.append(repeats.Run(rate, half if half is not None and math.isfinite(half) else None))
    return runs


def _entry(point: Point, found: Read, noise: repeats.Noise | None) -> Entry:
    trial = found.latest().get(point.id)
    if trial is None:
        return Entry(point.id, point.values, point.overrides, "pending")
    entry = Entry(
        point.id,
        point.values,
        point.overrides,
        trial.status if trial.status in get_args(Status) else "failed",
        peak_memory_gib=trial.peak_memory_gib,
        predicted_peak_gib=trial.predicted_peak_gib,
        seconds=trial.seconds,
        attempt=trial.attempt,
        error=trial.error,
        exit_code=trial.exit_code,
        stderr=trial.stderr,
        folder=trial.folder,
        started_at=trial.started_at,
        device=trial.device,
        code=trial.code,
    )
    rows = _counted(point, found)
    if not rows:
        return entry
    rate, ci95 = repeats.rate_with_interval(_runs(rows), noise)
    ceiling = _mean(row.ceiling_samples_per_s for row in rows)
    return replace(
        entry,
        samples_per_s=rate,
        ci95=ci95,
        runs=len(rows),
        readiness_frac=_mean(row.readiness_frac for row in rows),
        ceiling_frac=rate / ceiling if ceiling else None,
        peak_memory_gib=max((row.peak_memory_gib for row in rows if row.peak_memory_gib is not None), default=None),
        util_pct=_mean(row.util_pct for row in rows),
        confirms_failed=tuple(
            row.status if row.status != "ok" else "ok, but without a rate"
            for row in found.confirms(point.id)
            if row.status != "ok" or _rate(row) is None
        ),
    )


def _mean(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return fmean(known) if known else None


def _in_order(entries: Sequence[Entry], first_rates: Mapping[str, float]) -> list[Entry]:
    """Those that have a rate, as `leaderboard` sorts them; ``first_rates`` are those of their trials alone."""
    rated = sorted((entry for entry in entries if entry.samples_per_s is not None), key=lambda entry: -_speed(entry))
    order = [entry for entry in rated if entry.runs > 1]
    for entry in rated:
        if entry.runs > 1:
            continue
        mine = first_rates[entry.point]
        place = max(
            (at for at, other in enumerate(order, 1) if other.runs > 1 and first_rates[other.point] > mine), default=0
        )
        while place < len(order) and _speed(order[place]) >= _speed(entry):
            place += 1
        order.insert(place, entry)
    return order


def _ranked(entries: Sequence[Entry], first_rates: Mapping[str, float]) -> list[Entry]:
    """In order, with ranks; those without a rate last, by status and then in the grid's order."""
    rated = _in_order(entries, first_rates)
    ranked: list[Entry] = []
    leader = 0
    """Place, in ``ranked``, of the first of the group."""
    for place, entry in enumerate(rated):
        if entry.ci95 is None:
            ranked.append(replace(entry, rank=place + 1, tie="?"))
            continue
        led_by = ranked[leader].ci95 if ranked else None
        if led_by is not None and entry.ci95[1] >= led_by[0]:
            ranked[leader] = replace(ranked[leader], tie="=")
            ranked.append(replace(entry, rank=ranked[leader].rank, tie="="))
        else:
            leader = place
            ranked.append(replace(entry, rank=place + 1))
    rest = [entry for entry in entries if entry.samples_per_s is None]
    return ranked + sorted(rest, key=lambda entry: _ORDER.index(entry.status))


def _speed(entry: Entry) -> float:
    return entry.samples_per_s or 0.0


def _with_ratios(entries: Sequence[Entry]) -> list[Entry]:
    rated = [entry for entry in entries if entry.samples_per_s is not None]
    if not rated:
        return list(entries)
    best = _speed(rated[0])
    rates = {tuple(sorted(entry.values.items())): _speed(entry) for entry in rated}

    def of_baseline(entry: Entry) -> float | None:
        if "loader" not in entry.values:
            return None
        sister = rates.get(tuple(sorted({**entry.values, "loader": BASELINE}.items())))
        return None if sister is None else _speed(entry) / sister

    return [
        replace(entry, of_best=_speed(entry) / best, of_baseline=of_baseline(entry), on_front=_on_front(entry, rated))
        if entry.samples_per_s is not None
        else entry
        for entry in entries
    ]


def _on_front(entry: Entry, rated: Sequence[Entry]) -> bool:
    if entry.peak_memory_gib is None:
        return False
    mine = (_speed(entry), -entry.peak_memory_gib)
    others = [(_speed(other), -other.peak_memory_gib) for other in rated if other.peak_memory_gib is not None]
    return not any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others)


def _marked(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """Entries that were measured by other code or on another device than most are marked, and a note says so."""
    rated = [entry for entry in entries if entry.rank is not None]
    marked, notes = list(entries), []
    told_by: tuple[tuple[str, Callable[[Entry], str]], ...] = (
        ("code", lambda entry: entry.code),
        ("device", lambda entry: entry.device),
    )
    for noun, of in told_by:
        found = Counter(of(entry) for entry in rated)
        if len(found) < 2:
            continue
        usual = found.most_common(1)[0][0]
        marked = [
            replace(entry, marks=(*entry.marks, f"{noun} {of(entry) or 'unknown'}"))
            if entry.rank is not None and of(entry) != usual
            else entry
            for entry in marked
        ]
        told = ", ".join(f"{name or 'unknown'} ({counted(number, 'point')})" for name, number in found.most_common())
        what = "versions of the code" if noun == "code" else "devices"
        notes.append(
            f"The rates were measured with {len(found)} {what}, and a difference may be theirs: {told}. Marked: those "
            "that were not measured as most were."
        )
    return marked, notes


def _notes(entries: Sequence[Entry], noise: repeats.Noise | None, found: Read, present: set[str]) -> list[str]:
    notes = []
    if noise is not None:
        notes.append(
            f"Between runs of the same settings the rate differs by {show_percent(noise.relative_sd)} (standard "
            f"deviation, {counted(noise.degrees, 'degree')} of freedom)."
        )
    elif any(entry.rank is not None for entry in entries):
        notes.append(
            "No point was measured twice: intervals are of one run each and know nothing of noise between runs."
        )
    if any(entry.tie == "?" for entry in entries):
        notes.append("A rank with '?' has no interval: too few steps were measured to tell it from its neighbours.")
    notes += [
        f"{entry.point}: {counted(len(entry.confirms_failed), 'run')} that should have confirmed it gave no rate "
        f"({', '.join(entry.confirms_failed)})."
        for entry in entries
        if entry.confirms_failed
    ]
    silent = sum(entry.status == "ok" and entry.rank is None for entry in entries)
    if silent:
        notes.append(f"{counted(silent, 'point')} ended well without a rate: too few steps were measured.")
    gone = {row.point for row in found.rows} - present
    if gone:
        notes.append(f"{counted(len(gone), 'point')} of earlier grids of this sweep left out.")
    if found.damaged:
        lines = ", ".join(map(str, found.damaged))
        notes.append(f"Left out of the ledger, cut by a crash or a full disk: line {lines}.")
    return notes
