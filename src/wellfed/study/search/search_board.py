"""Ranks the trials of a search by the metric of validation: those trained to their end first, then what was pruned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from wellfed.record import plain
from wellfed.study.search.curves import CurvePoint
from wellfed.study.search.search_file import SearchFile
from wellfed.study.search.search_rows import SearchRow
from wellfed.study.search.space import grid_values
from wellfed.study.sweep.grid import Grid, GridPoint
from wellfed.study.sweep.ledger import ReadOf
from wellfed.study.sweep.rows import why_of
from wellfed.units import counted

State = Literal["complete", "pruned", "failed", "pending"]
_ORDER: tuple[State, ...] = ("complete", "pruned", "failed", "pending")


@dataclass(frozen=True)
class TrialEntry:
    """One point. Figures are None where there are none."""

    point: str
    trial: int | None
    """The number of its last trial; None: none has ended yet."""
    values: Mapping[str, str]
    """Axis -> value, as typed."""
    overrides: tuple[str, ...]
    state: State
    rank: int | None = None
    """1 = best; equal values share a rank. None for what was not trained to its end."""
    row: SearchRow | None = None
    """Of its last trial."""
    curve: tuple[CurvePoint, ...] = ()
    why: str = ""
    """Why it has no rank, in a line; empty with one."""

    @property
    def value(self) -> float | None:
        """The best that the metric was at a validation."""
        return None if self.row is None else self.row.value

    @property
    def status(self) -> str:
        """How the trial ended, in a word: that of run.json, where it is no more to the search."""
        return self.row.status if self.state == "failed" and self.row is not None else self.state

    @property
    def folder(self) -> str:
        """Of its last trial, within the search's; empty where none was started."""
        return "" if self.row is None else self.row.folder


@dataclass(frozen=True)
class SearchBoard:
    """The entries in order: ranks, then pruned ones, the furthest first, then what failed."""

    search: SearchFile
    entries: tuple[TrialEntry, ...]
    notes: tuple[str, ...]
    """What a reader of the figures must know."""

    @property
    def ranked(self) -> list[TrialEntry]:
        """Those trained to their end, the best first."""
        return [entry for entry in self.entries if entry.rank is not None]

    @property
    def best(self) -> TrialEntry | None:
        """The first of the ranks."""
        return next(iter(self.ranked), None)

    @property
    def pruned(self) -> list[TrialEntry]:
        """Those that were ended early."""
        return [entry for entry in self.entries if entry.state == "pruned"]

    @property
    def failed(self) -> list[TrialEntry]:
        """Those that ended otherwise."""
        return [entry for entry in self.entries if entry.state == "failed"]

    @property
    def counts(self) -> dict[str, int]:
        """State -> points."""
        found = Counter(entry.state for entry in self.entries)
        return {state: found[state] for state in _ORDER if found[state]}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON can hold it."""
        entries = [{**asdict(entry), "value": entry.value, "status": entry.status} for entry in self.entries]
        found: dict[str, Any] = plain({"search": self.search.to_dict(), "entries": entries, "notes": self.notes})
        return {**found, "counts": self.counts}


def board(file: SearchFile, found: ReadOf[SearchRow], curves: Mapping[str, Sequence[CurvePoint]]) -> SearchBoard:
    """The board of a search as it stands; ``curves`` by the folder of a trial.

    A point is known by its last trial. Of a grid every point has an entry, and rows of earlier grids are left out.
    """
    latest = found.latest()
    if file.ids:
        made = Grid(grid_values(file.space), file.fixed).points()
        pairs = [(replace(point, id=own), latest.get(own)) for point, own in zip(made, file.ids, strict=True)]
    else:
        pairs = [(_point(file, row), row) for row in latest.values()]
    entries = [_entry(point, row, curves) for point, row in pairs]
    done = sorted((entry for entry in entries if entry.state == "complete"), key=lambda entry: _better(file, entry))
    values = [entry.value for entry in done]
    ranked = [replace(entry, rank=1 + values.index(entry.value)) for entry in done]
    rest = [entry for entry in entries if entry.state != "complete"]
    rest.sort(key=lambda entry: (_ORDER.index(entry.state), -(entry.row.validations if entry.row else 0)))
    return SearchBoard(file, (*ranked, *rest), tuple(_notes(file, entries, found)))


def is_better(file: SearchFile, row: SearchRow, than: SearchRow | None) -> bool:
    """Whether a row would stand before another one, or before none."""
    if row.outcome != "complete" or row.value is None:
        return False
    if than is None or than.value is None:
        return True
    return row.value > than.value if file.higher_is_better else row.value < than.value


def _better(file: SearchFile, entry: TrialEntry) -> float:
    assert entry.value is not None
    return -entry.value if file.higher_is_better else entry.value


def _point(file: SearchFile, row: SearchRow) -> GridPoint:
    typed = dict(text.partition("=")[::2] for text in row.overrides)
    return GridPoint(row.point, {axis: typed.get(axis, "") for axis in file.space}, row.overrides)


def _entry(point: GridPoint, row: SearchRow | None, curves: Mapping[str, Sequence[CurvePoint]]) -> TrialEntry:
    if row is None:
        return TrialEntry(point.id, None, point.values, point.overrides, "pending", why="no trial has ended yet")
    curve = tuple(curves.get(row.folder, ()))
    return TrialEntry(
        point.id, row.trial, point.values, point.overrides, row.outcome, row=row, curve=curve, why=_why(row)
    )


def _why(row: SearchRow) -> str:
    if row.outcome == "complete":
        return ""
    if row.outcome == "pruned":
        return f"ended after {counted(row.validations, 'validation')}, {counted(row.trained_steps, 'step')}"
    if row.error:
        return why_of(row.error, row.folder)
    if row.status == "ok":
        return "ended well, but validation gave no finite figure of the metric"
    return "nothing is known of its end" if row.exit_code is None else f"exit code {row.exit_code}"


def _notes(file: SearchFile, entries: Sequence[TrialEntry], found: ReadOf[SearchRow]) -> list[str]:
    notes = []
    rows = [entry.row for entry in entries if entry.row is not None and entry.row.outcome == "complete"]
    codes = Counter(row.code for row in rows)
    if len(codes) > 1:
        told = ", ".join(f"{name} ({counted(number, 'trial')})" for name, number in codes.most_common())
        notes.append(f"The trials ran with {len(codes)} versions of the code, and a difference may be theirs: {told}.")
    if len(rows) > 1 and "seed" not in file.space:
        notes.append(
            "One training a point: how much the metric differs between seeds is not known. Train the best again with "
            "other seeds before a small difference is believed."
        )
    return [*notes, *found.says_left_out((entry.point for entry in entries), "search")]
