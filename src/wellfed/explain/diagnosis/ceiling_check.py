"""Compares the ceiling of a run with the time that the run waited for data.

The ceiling is measured at another time than training. If the machine was slower at one of the two, their ratio is not
the gain of a better loader. The share of time spent waiting shows this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wellfed.observe.timing.wall import hooks_within_steps_s
from wellfed.record.entries import LongestWaitEntry, RunRecord, Throughput, TimeEntry
from wellfed.units import show_count, show_percent

_NOISE_FRAC = 0.1
"""Minimum relative difference for a contradiction, since the ceiling covers only some 20 steps."""
_EXPLAINED_FRAC = 0.5
"""Minimum ratio of the time that the ceiling would save to the time spent on data, for both to agree."""


@dataclass(frozen=True)
class Contradiction:
    """Contradiction of rate, ceiling and waiting, which is impossible at constant speed of the machine."""

    slower: Literal["steps", "loop", "ceiling", "rank"]
    """Part that took longer than the other figures predict; ``rank``: another rank, awaited within the steps."""
    data_frac: float
    """Share of training's time spent on data: waiting for it and copying it."""
    without_data_per_s: float
    """Samples/s of training without its waiting, from its own steps."""
    hooks_frac: float = 0.0
    """Share of training's time in callbacks and hooks within the steps, which the ceiling does not run."""
    rank: LongestWaitEntry | None = None


def contradiction(record: RunRecord) -> Contradiction | None:
    """Returns which figures of a record contradict each other; None if none do, or one was not measured."""
    throughput, ceiling, time = record.throughput, record.ceiling, record.time
    if not (throughput and ceiling and time) or time["wait_frac"] is None:
        return None
    rate, top = throughput["samples_per_s"], ceiling["samples_per_s"]
    low, high = throughput["ci95"] or (rate, rate)
    data, without_data, hooks = _data_frac(time), _without_data(throughput, time), _hooks_frac(record)
    known = min(data + hooks, 0.999)
    gap = 1 - rate / top  # share of training's time saved at the ceiling's rate
    noise = 1 + _NOISE_FRAC
    if known < _EXPLAINED_FRAC * gap and top > noise * high / (1 - known):
        longest = record.loading.get("longest_wait")
        if longest is not None and longest["wait_frac"] >= _EXPLAINED_FRAC * gap:
            return Contradiction("rank", data, without_data, hooks, longest)
        in_loop = time["host_frac"] >= 0.5 * (gap - known)
        return Contradiction("loop" if in_loop else "steps", data, without_data, hooks)
    if data > _NOISE_FRAC and gap < _EXPLAINED_FRAC * data and noise * top < low / (1 - data):
        return Contradiction("ceiling", data, without_data, hooks)
    return None


def ceiling_line(record: RunRecord) -> str | None:
    """Returns a line on the ceiling and what it means for this run; None if there is nothing to report. Without a
    ceiling, a prediction is shown if time could be won."""
    throughput = record.throughput
    if not throughput:
        return None
    unit = throughput["sample_unit"]
    is_busy = any(finding["id"] == "busy_machine" for finding in record.findings)
    if not record.ceiling:
        if not record.time or _data_frac(record.time) <= _NOISE_FRAC or is_busy:
            return None
        return (
            f"without waiting for data its steps would make {show_count(_without_data(throughput, record.time))} "
            f"{unit}/s (predicted; no ceiling was measured)"
        )
    top = record.ceiling["samples_per_s"]
    share = throughput["samples_per_s"] / top
    line = f"ceiling {show_count(top)} {unit}/s with batches already on the device: this run "
    line += f"reached {show_percent(share)} of it" if share < 1 else "was no slower"
    found = contradiction(record)
    if found is not None:
        is_reported = any(finding["id"] == "machine_was_slower" for finding in record.findings)
        return line if is_reported or is_busy else f"{line}. {explanation(found, unit)}"
    return line if share < 1 else f"{line}, so data cost it nothing"


def explanation(found: Contradiction, unit: str) -> str:
    """Returns why the ceiling is doubtful, and how much can be won."""
    share = show_percent(found.data_frac)
    if found.slower == "ceiling":
        return (
            f"That is too low: {share} of training's time went into data, and without that its own steps make "
            f"{show_count(found.without_data_per_s)} {unit}/s (predicted). Something that was not recorded made the "
            "ceiling slower."
        )
    if found.rank is not None:
        where = f"rank {found.rank['rank']} on node {found.rank['node']}"
        return (
            f"Only {share} of rank 0's time went into data, but {where} stood waiting for its own for "
            f"{show_percent(found.rank['wait_frac'])} of the time, and all others waited for it within their steps. "
            "Look at what is slower there: its disk, its CPUs, other processes."
        )
    only = f"But only {share} of its time went into data, which is all that a loader can win: the "
    if found.hooks_frac > 0.01:
        only = f"But only {share} of its time went into data and {show_percent(found.hooks_frac)} into callbacks: the "
    if found.slower == "loop":
        return f"{only}rest was lost between the steps, and nothing that was recorded explains it."
    return f"{only}steps themselves were slower than in the ceiling, and nothing that was recorded explains it."


def _data_frac(time: TimeEntry) -> float:
    """Returns the share of training's time spent on data, < 1."""
    return min(time["wait_frac"] + (time["copy_frac"] or 0.0), 0.999)


def _hooks_frac(record: RunRecord) -> float:
    """Returns the measured share of callbacks and hooks in the time of all steps."""
    wall = record.wall
    if wall is None:
        return 0.0
    hooks_s = hooks_within_steps_s(wall)
    return hooks_s / max(1e-9, wall["steps_s"] + hooks_s)


def _without_data(throughput: Throughput, time: TimeEntry) -> float:
    """Returns the samples/s of a run's own steps without waiting for data and copying it."""
    return throughput["samples_per_s"] / (1 - _data_frac(time))
