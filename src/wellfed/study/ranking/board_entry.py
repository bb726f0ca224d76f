"""One leaderboard for all studies: its entries, in order, and what a reader must know of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from wellfed.record.entries import Status
from wellfed.record.files import plain
from wellfed.study.objective import Objective
from wellfed.study.points.grid import GridPoint
from wellfed.study.repeats import Noise
from wellfed.study.rows import Row
from wellfed.study.study_files import SearchFile, SweepFile

EntryStatus = Literal[Status, "complete", "pruned", "pending"]
ORDER = (
    *("ok", "complete", "pruned", "oom", "infeasible", "invalid", "timeout", "failed"),
    *("killed", "interrupted", "running", "pending"),
)
"""Statuses of entries in order; without a rank, ends caused by the settings come before ends from outside."""


@dataclass(frozen=True)
class Entry:
    """One point."""

    point: str
    values: Mapping[str, str]
    """Axis -> value, as typed."""
    overrides: tuple[str, ...]
    status: EntryStatus
    """End of its last trial; ``pending``: none has ended yet."""
    row: Row
    """Last trial of the point; without one an empty row. Its figures are means over the runs that count."""
    rank: int | None = None
    """1 = best. Entries of one rank tie; None without a figure that ranks."""
    tie: Literal["", "=", "?"] = ""
    """``=``: shares its rank by overlapping intervals. ``?``: its noise is unknown."""
    score: float | None = None
    """Figure of the study's objective, which ranks."""
    ci95: tuple[float, float] | None = None
    """95 % interval of the score."""
    runs: int = 0
    """Measurements that the score is the mean of: the trial, and those that confirm it."""
    of_best: float | None = None
    """Score relative to the best score, 0..1; 1 is the best."""
    of_baseline: float | None = None
    """Factor by which it is better than the point that has ``loader=baseline`` and equals this one in all else."""
    of_baseline_ci95: tuple[float, float] | None = None
    """None: one of the two has no interval or was measured once, or this is the baseline."""
    why: str = ""
    """Why it has no rank, in a line; empty with one."""

    @property
    def label(self) -> str:
        """The rank for show: ``1``, ``1=``, ``2?``; empty without one."""
        return "" if self.rank is None else f"{self.rank}{self.tie}"

    @property
    def ceiling_frac(self) -> float | None:
        """Rate over the rate of the same steps on batches that are on the device."""
        rate, ceiling = self.row.samples_per_s, self.row.ceiling_samples_per_s
        return rate / ceiling if rate and ceiling else None

    @property
    def seconds(self) -> float | None:
        """Duration of its last trial; None: none has ended yet."""
        return None if self.status == "pending" else self.row.seconds

    @property
    def state(self) -> str:
        """Status in one of complete, pruned, failed and pending."""
        return self.status if self.status in ("complete", "pruned", "pending") else "failed"

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures by name, those of its last trial included."""
        row = {} if self.status == "pending" else vars(self.row)
        own = {name: value for name, value in vars(self).items() if name != "row"}
        return {**row, **own, "state": self.state, "ceiling_frac": self.ceiling_frac}


def pending(point: GridPoint) -> Entry:
    """Returns the entry of a point that has no row yet."""
    empty = Row(point.id, "trial", point.overrides, "running")
    return Entry(point.id, point.values, point.overrides, "pending", empty, why="no trial has ended yet")


@dataclass(frozen=True)
class Leaderboard:
    """The entries in order: one for each point of the grid that was asked for last, or for each point tried."""

    file: SweepFile | SearchFile
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    """Notes for readers of the figures."""
    noise: Noise | None = None
    """Noise between runs of the same settings; None where nothing was measured twice."""

    @property
    def is_of_search(self) -> bool:
        """Whether whole trainings are ranked by a metric."""
        return isinstance(self.file, SearchFile)

    @property
    def objective(self) -> Objective:
        """Figure that ranks."""
        return self.file.ranked_by

    @property
    def code(self) -> str:
        """Versions of the code that the ranked entries ran with; that of the last command where none ranks."""
        return "; ".join(dict.fromkeys(entry.row.code or "unknown" for entry in self.ranked)) or self.file.code

    @property
    def machine(self) -> str:
        """Processors and devices that the ranked entries ran on; empty where unknown."""
        known = (f"{entry.row.machine}; {entry.row.device}" for entry in self.ranked if entry.row.machine)
        return " / ".join(dict.fromkeys(known))

    @property
    def ranked(self) -> list[Entry]:
        """Entries that have a rank, the best first."""
        return [entry for entry in self.entries if entry.rank is not None]

    @property
    def best(self) -> Entry | None:
        """The first of the ranks."""
        return next(iter(self.ranked), None)

    @property
    def pruned(self) -> list[Entry]:
        """Entries that were ended early."""
        return [entry for entry in self.entries if entry.status == "pruned"]

    @property
    def failed(self) -> list[Entry]:
        """Entries that have ended without a rank and were not pruned."""
        return [entry for entry in self.entries if entry.rank is None and entry.state == "failed"]

    @property
    def pending(self) -> list[Entry]:
        """Entries of which no trial has ended yet."""
        return [entry for entry in self.entries if entry.status == "pending"]

    @property
    def counts(self) -> dict[str, int]:
        """Number of points by status; of whole trainings by state."""
        found = Counter(entry.state if self.is_of_search else entry.status for entry in self.entries)
        return {status: found[status] for status in sorted(found, key=ORDER.index)}

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, as JSON can hold it."""
        noise = None if self.noise is None else asdict(self.noise)
        entries = [entry.to_dict() for entry in self.entries]
        return {
            **plain({**self.file.to_dict(), "entries": entries, "noise": noise, "notes": self.notes}),
            "counts": self.counts,
        }
