"""Writes and reads ``ledger.jsonl``: a line for each trial that ended, written at once and never changed.

Whatever stops a sweep, at most the trials that were running are not in it. The same command again runs what is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from wellfed.masking import hidden_in
from wellfed.record import Status, bounded, plain
from wellfed.units import counted

FILE_NAME = "ledger.jsonl"
_LONGEST_LINE = 2**20
"""Characters of a row; a longer line is cut, and so no row."""


RowKind = Literal["trial", "confirm", "repeat"]
"""``confirm``: one of the best, measured once more; ``repeat``: what tune measures again to learn the noise."""


@dataclass(frozen=True)
class Row:
    """What became of one trial. Figures are None where they were not measured."""

    point: str
    kind: RowKind
    overrides: tuple[str, ...]
    """As typed, those that all points share first."""
    status: Status
    attempt: int
    """Counts the rows of this point and kind, from 1."""
    samples_per_s: float | None = None
    seconds: float = 0.0
    """The whole trial, from the start of its process to its end."""
    ci95: tuple[float, float] | None = None
    """Of samples_per_s, from the steps of this one trial."""
    steps: int = 0
    """Measured, without the warm-up."""
    warmup_steps: int = 0
    readiness_frac: float | None = None
    ceiling_samples_per_s: float | None = None
    peak_memory_gib: float | None = None
    """On CUDA what the allocator reserved, else the growth of the process."""
    predicted_peak_gib: float | None = None
    util_pct: float | None = None
    """Mean over the trial's GPUs while it trained; None without NVML."""
    energy_per_sample_j: float | None = None
    """Of all its GPUs together; None where one of them was not read for nearly all of training."""
    device: str = ""
    """What it trained on, in words."""
    error: Mapping[str, Any] | None = None
    """``kind``, ``message``, ``advice`` as in run.json."""
    exit_code: int | None = None
    """Negative: the signal that ended the process."""
    stderr: tuple[str, ...] = ()
    """The last lines, unless the status is ok."""
    folder: str = ""
    """Of the trial, within the sweep's; empty where none was started."""
    started_at: str = ""
    """UTC."""
    code: str = ""
    """The version of the code, as in sweep.json."""
    host: str = ""
    """The name of the machine that ran it."""
    machine: str = ""
    """Processor and cores of the host, in words; empty where nobody looked."""

    def to_line(self) -> str:
        """One line of strict JSON, without its end."""
        return json.dumps(hidden_in(plain(asdict(self))), allow_nan=False)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """The row of a parsed line; what a later version has added is left out.

        Raises:
            KeyError, TypeError, ValueError: it is no row.
        """
        hints = get_type_hints(cls)
        known = {
            each.name: _checked(each.name, hints[each.name], found[each.name])
            for each in fields(cls)
            if each.name in found
        }
        low_high = known.get("ci95")
        return cls(
            **{
                **known,
                "point": str(found["point"]),
                "overrides": tuple(map(str, found["overrides"])),
                "status": known["status"],
                "ci95": None if low_high is None else (float(low_high[0]), float(low_high[1])),
                "stderr": tuple(map(str, known.get("stderr") or ())),
            }
        )


def _checked(name: str, hint: Any, value: Any) -> Any:
    """The value of a row, if it is of its kind; texts of an error are made sure of. Raises ValueError otherwise."""
    parts = get_args(hint)
    if value is None:
        if NoneType not in parts:
            raise ValueError(f"{name} is null")
        return None
    if get_origin(hint) is Literal:
        is_sound = value in parts
    elif hint is str:
        is_sound = isinstance(value, str)
    elif hint in (int, float) or parts[:1] in ((int,), (float,)):
        is_sound = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_sound = is_sound and (int not in (hint, *parts[:1]) or value == int(value))
    elif name == "error":
        is_sound = isinstance(value, Mapping)
        value = {key: str(text) for key, text in value.items() if text is not None} if is_sound else value
    else:  # a list of texts, or an interval
        is_sound = isinstance(value, list)
    if not is_sound:
        raise ValueError(f"{name} is {str(value)[:40]!r}")
    return value


R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class ReadOf(Generic[R]):
    """What a ledger holds, of a kind of rows."""

    rows: tuple[R, ...]
    """In the order in which they were written."""
    damaged: tuple[int, ...]
    """Numbers, from 1, of the lines that are none: cut by a crash or a full disk."""

    def latest(self, kind: str = "trial") -> dict[str, R]:
        """The last row of each point."""
        return {row.point: row for row in self.rows if row.kind == kind}

    def confirms(self, point: str) -> list[R]:
        """Rows that confirm the last trial of a point: after it, with its code, on its device, on a machine
        of the same kind; one that ended before it could tell its device counts as a failed one."""
        own = [row for row in self.rows if row.point == point]
        last = max((place for place, row in enumerate(own) if row.kind == "trial"), default=None)
        if last is None:
            return []
        trial = own[last]
        return [
            row
            for row in own[last + 1 :]
            if row.kind == "confirm"
            and row.code == trial.code
            and (row.device == trial.device or (row.status != "ok" and not row.device))
            and (row.machine == trial.machine or not (row.machine and trial.machine))
        ]

    def of(self, point: str, kind: str) -> list[R]:
        """All rows of a point, in order."""
        return [row for row in self.rows if row.point == point and row.kind == kind]

    def says_left_out(self, shown: Iterable[str], noun: str) -> list[str]:
        """Sentences on what a table of the points ``shown`` lacks: other grids' rows, damaged lines."""
        says, others = [], {row.point for row in self.rows}.difference(shown)
        if others:
            says.append(f"{counted(len(others), 'point')} of earlier grids of this {noun} left out.")
        if self.damaged:
            lines = ", ".join(map(str, self.damaged))
            says.append(f"Left out of the ledger, cut by a crash or a full disk: line {lines}.")
        return says


Read = ReadOf[Row]
"""Of a sweep."""


def read(folder: Path) -> Read:
    """The ledger of a sweep folder; empty where there is none yet.

    Raises:
        OSError: it is there and can't be read.
    """
    return read_rows(folder, Row)


def read_rows(folder: Path, kind: type[R]) -> ReadOf[R]:
    """As `read`, of rows that hold more."""
    try:
        text = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ReadOf((), ())
    rows, damaged = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(kind.from_dict(bounded(json.loads(line[:_LONGEST_LINE]))))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            damaged.append(number)
    return ReadOf(tuple(rows), tuple(damaged))


def append(folder: Path, rows: Iterable[Row]) -> None:
    """Write rows at the end, on disk on return. A line that was cut keeps its place, on a line of its own.

    Raises:
        OSError: not written, or not all of it.
    """
    text = "".join(f"{row.to_line()}\n" for row in rows)
    if not text:
        return
    with (folder / FILE_NAME).open("ab+") as stream:  # O_APPEND: one write, one place
        if stream.seek(0, os.SEEK_END) > 0:
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                text = "\n" + text
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())


def missing(points: Sequence[str], found: ReadOf[R], retry: Sequence[str] = ()) -> list[str]:
    """Points that still have to be run, in order: never finished, interrupted, known bad before they could run, or of a
    status that is to be tried again."""
    latest = found.latest()
    again = {"invalid", "infeasible", "interrupted", *retry}
    return [point for point in points if point not in latest or latest[point].status in again]
