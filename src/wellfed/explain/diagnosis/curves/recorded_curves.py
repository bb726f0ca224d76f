"""Reads curves of GPU utilisation from a CSV of nvidia-smi, of the monitor, or of telemetry."""

from __future__ import annotations

import codecs
import csv
import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt

from wellfed.command_line import command
from wellfed.errors import DataError
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.observe.telemetry.machines import HOST
from wellfed.record import regular
from wellfed.units import show_text

Writer = Literal["nvidia-smi", "wellfed"]
ASK_NVIDIA_SMI = "nvidia-smi --query-gpu=timestamp,index,name,utilization.gpu,memory.used --format=csv -l 1 > gpus.csv"
ASK_MONITOR = f"{command('monitor')} --for 60s --csv gpus.csv"
_WAY_OUT = f"Such a file comes from: {ASK_MONITOR}, or: {ASK_NVIDIA_SMI}"
_TIMES = "as 2026/05/01 12:34:56.789 or 2026-05-01T12:34:56, or seconds in a column time_s"
_UTILISATION = ("util_pct", "utilization.gpu")
_TIME = ("time_s", "timestamp")
_GPU = ("gpu", "index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "serial", "gpu_serial")
_CARD = ("name", "gpu_name")
_HEAD_BYTES, _HEAD_ROWS = 65_536, 20
"""Bytes and rows that must contain the header. A shell may have written something before it."""
_TRAINING = "train"
_ROUND_QUANTILE, _ROUND_FRAC = 97, 0.5
"""Without a column of GPUs, a pause of this share of a usual one (this percentile) begins a new round of rows."""
_EVEN_FRAC = 0.95
"""Minimum share of rounds with the same number of rows."""


@dataclass(frozen=True)
class GpuCurve:
    """The utilisation of one GPU, without readings that are not numbers."""

    gpu: str
    """Number of the GPU, or another identifier in the file."""
    card: str
    """Name of the card; empty if the file lacks it."""
    time_s: Series
    """Seconds since the first reading of the file."""
    util_pct: Series


@dataclass(frozen=True)
class RecordedCurves:
    """Contents of a file of curves."""

    writer: Writer
    curves: tuple[GpuCurve, ...]
    interval_s: float | None
    """Median time between two readings of a GPU; None with fewer than two."""
    unread: int
    """Number of rows without a reading: incomplete, or without a time."""
    out_of_order: int = 0
    """Number of rows left out where the clock went back. The longest interval of each GPU is kept."""


def read_curves(path: Path) -> RecordedCurves:
    """Reads the curves of a file. Of telemetry, only readings during training are used.

    Raises:
        DataError: the file is unreadable, or has no readings of GPUs.
    """
    try:
        with _opened(path) as stream:
            rows = csv.reader(_whole(stream), skipinitialspace=True)
            columns = _Columns.found(path, list(islice(rows, _HEAD_ROWS)))
            gathered = _gathered(columns, chain(columns.first_rows, rows))
    except OSError as error:
        raise _refused(path, f"can't be read: {error.strerror or error}.", "Name another file.") from error
    except csv.Error as error:
        raise _refused(path, f"is no CSV ({error}).") from error
    curves, out_of_order = _curves(gathered, has_gpu=columns.gpu is not None)
    if not curves and gathered.odd_time is not None:
        problem = f"has no time that can be read; the first: {show_text(repr(gathered.odd_time[:40]))}."
        raise _refused(path, problem, f"Times are {_TIMES}. {_WAY_OUT}")
    if not curves:
        only_host = ", only of the host" if gathered.rows_of_host else ""
        in_training = "" if columns.phase is None else " in training"
        raise _refused(path, f"has the columns of telemetry, and no readings of a GPU{in_training}{only_host}.")
    gaps_s = np.concatenate([np.diff(curve.time_s) for curve in curves])
    interval_s = float(np.median(gaps_s)) if len(gaps_s) else None
    return RecordedCurves(columns.writer, curves, interval_s, gathered.unread, out_of_order)


def _refused(path: Path, problem: str, way_out: str = _WAY_OUT) -> DataError:
    return DataError(f"{path}: {problem} {way_out}")


def _opened(path: Path) -> IO[str]:
    """Opens the file as text, in UTF-8 or in UTF-16, which PowerShell writes."""
    with regular(path).open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    if not head.strip():
        raise _refused(path, "is empty.")
    is_wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "utf-16" if is_wide else "utf-8-sig"
    text = head.decode(encoding, "replace")
    if "\0" in text or ("\n" not in text and len(head) == _HEAD_BYTES):
        raise _refused(path, "is no text with lines.")
    return path.open(encoding=encoding, errors="replace", newline="")


def _whole(stream: IO[str]) -> Iterator[str]:
    """Yields the first line, and other lines with a line end. Without one, the last figure may be incomplete."""
    return (line for number, line in enumerate(stream) if number == 0 or line.endswith(("\n", "\r")))


@dataclass(frozen=True)
class _Columns:
    """Indices of the columns in a row."""

    writer: Writer
    header: Sequence[str]
    first_rows: Sequence[Sequence[str]]
    """Rows below the header that were read with it."""
    time: int
    util: int
    gpu: int | None
    card: int | None
    phase: int | None

    @classmethod
    def found(cls, path: Path, rows: Sequence[Sequence[str]]) -> _Columns:
        """Finds the header: the first row that names a column of utilisation."""
        named = [[re.sub(r"\s*\[.*\]$", "", cell.strip()).lower() for cell in row] for row in rows]
        at = next((index for index, names in enumerate(named) if _index_of(names, _UTILISATION) is not None), None)
        if at is None:
            raise _refused(path, *_not_telemetry([row for row in rows if row]))
        names = named[at]
        util, time = _index_of(names, _UTILISATION), _index_of(names, _TIME)
        assert util is not None
        if time is None:
            way_out = f"Add timestamp to what nvidia-smi is asked for: {ASK_NVIDIA_SMI}"
            raise _refused(path, "has no column of time (timestamp or time_s).", way_out)
        writer: Writer = "wellfed" if names[util] == "util_pct" else "nvidia-smi"
        indices = (_index_of(names, _GPU), _index_of(names, _CARD), _index_of(names, ("phase",)))
        return cls(writer, rows[at], rows[at + 1 :], time, util, *indices)

    @property
    def width(self) -> int:
        """Minimum number of cells in a row."""
        return 1 + max(index for index in (self.time, self.util, self.gpu, self.card, self.phase) if index is not None)


def _index_of(names: Sequence[str], wanted: Sequence[str]) -> int | None:
    return next((names.index(name) for name in wanted if name in names), None)


def _not_telemetry(rows: Sequence[Sequence[str]]) -> tuple[str, str]:
    """Returns the problem of a file without a column of utilisation, and the advice."""
    cells = [cell.strip() for cell in rows[0]] if rows else []
    if any(re.fullmatch(r"\d+ %|\d{4}/\d\d/\d\d .*", cell) for cell in cells):
        first_line = "timestamp, index, utilization.gpu [%]"
        way_out = f"Write what --query-gpu named as the first line, for example: {first_line}"
        return "has no header: nvidia-smi wrote it with noheader.", way_out
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if any(mark in cell and any(wanted in cell.lower() for wanted in _UTILISATION) for cell in cells):
            return f"has {name} between its columns.", "Write it with commas, and with a point in decimals."
    named = show_text(", ".join(cell[:40] for cell in cells[:12]))
    return f"has no column of utilisation (utilization.gpu or util_pct). Its first line: {named or 'none'}.", _WAY_OUT


@dataclass
class _Gathered:
    """Readings by GPU, in the order of the file."""

    readings: dict[str, array[float]] = field(default_factory=dict)
    """Alternating time and utilisation."""
    cards: dict[str, str] = field(default_factory=dict)
    unread: int = 0
    rows_of_host: int = 0
    odd_time: str | None = None
    """First time that could not be read."""


def _in_order(time_s: Series) -> npt.NDArray[np.int64]:
    """Returns the indices of the longest interval in which time increases, without single rows out of order."""
    indices: npt.NDArray[np.int64] = np.arange(len(time_s))
    if not (np.diff(time_s) < 0).any():
        return indices
    before, here, after = time_s[:-2], time_s[1:-1], time_s[2:]
    is_odd = (before <= after) & ((here < before) | (here > after))
    indices = indices[~np.concatenate([[False], is_odd, [False]])]
    gaps_s = np.diff(time_s[indices])
    if not (gaps_s < 0).any():
        return indices
    # A clock that was wrong for a while jumps forward as far as it jumps back.
    cuts = np.flatnonzero((gaps_s < 0) | (gaps_s >= -gaps_s.min())) + 1
    stretches: list[npt.NDArray[np.int64]] = np.split(indices, cuts)
    return max(stretches, key=len)


def _gathered(columns: _Columns, rows: Iterator[Sequence[str]]) -> _Gathered:
    found, seconds_of, host = _Gathered(), _clock(columns.header[columns.time].strip().lower()), str(HOST)
    gpu, card, phase, width = columns.gpu, columns.card, columns.phase, columns.width
    for row in rows:
        if len(row) < width:
            found.unread += bool(row)
        elif gpu is not None and row[gpu].rpartition("/")[2] == host:  # also of another node
            found.rows_of_host += 1
        elif (phase is None or row[phase] == _TRAINING) and row != columns.header:
            try:
                time_s = seconds_of(row[columns.time])
            except ValueError:
                found.unread += 1
                found.odd_time = row[columns.time] if found.odd_time is None else found.odd_time
            else:
                name = "" if gpu is None else row[gpu].strip()
                found.cards.setdefault(name, "" if card is None else row[card].strip())
                found.readings.setdefault(name, array("d")).extend((time_s, _percent(row[columns.util])))
    return found


def _percent(cell: str) -> float:
    """Returns the percentage; ``nan`` for ``[N/A]``, ``[Not Supported]`` and empty cells."""
    try:
        percent = float(cell.rstrip("% "))
    except ValueError:
        return math.nan
    return percent if 0 <= percent <= 100 else math.nan


def _clock(name: str) -> Callable[[str], float]:
    """Returns a function from cell to seconds. It raises ValueError if the cell holds no time."""
    if name == "time_s":
        return _finite
    latest = ("", 0.0)

    def seconds(cell: str) -> float:
        nonlocal latest
        second, _, rest = cell.strip().partition(".")
        if second != latest[0]:
            latest = (second, datetime.fromisoformat(second.replace("/", "-")).timestamp())
        return latest[1] + (float(f"0.{rest}") if rest else 0.0)

    return seconds


def _finite(cell: str) -> float:
    value = float(cell)
    if not math.isfinite(value):
        raise ValueError(cell)
    return value


def _curves(found: _Gathered, *, has_gpu: bool) -> tuple[tuple[GpuCurve, ...], int]:
    """Returns the curves, and the number of rows left out since the clock went back."""
    tables = {gpu: np.array(flat).reshape(-1, 2) for gpu, flat in found.readings.items()}
    kept = {gpu: table[_in_order(table[:, 0])] for gpu, table in tables.items()}
    out_of_order = sum(len(table) - len(kept[gpu]) for gpu, table in tables.items())
    cards: Mapping[str, str] = found.cards
    if not has_gpu and kept:
        number = _gpus_a_round(kept[""][:, 0])
        kept = {str(each): kept[""][each::number] for each in range(number)}
        cards = dict.fromkeys(kept, found.cards[""] if number == 1 else "")
    began_s = min((table[0, 0] for table in kept.values() if len(table)), default=0.0)
    known = {gpu: table[np.isfinite(table[:, 1])] for gpu, table in kept.items()}
    names = sorted(known, key=lambda name: (len(name), name))
    curves = tuple(GpuCurve(gpu, cards[gpu], known[gpu][:, 0] - began_s, known[gpu][:, 1]) for gpu in names)
    return curves, out_of_order


def _gpus_a_round(time_s: Series) -> int:
    """Returns the number of GPUs in a round, for a file without a column of GPUs; 1 if rounds are uneven."""
    gaps_s = np.diff(time_s)
    if not len(gaps_s):
        return 1
    pause_s = _ROUND_FRAC * float(np.percentile(gaps_s, _ROUND_QUANTILE))
    begins = np.flatnonzero(np.append(True, gaps_s > pause_s))
    sizes = np.diff(begins)  # without the last, which may be incomplete
    if not len(sizes):
        return 1
    number = int(np.median(sizes))
    return number if number >= 1 and np.mean(sizes == number) >= _EVEN_FRAC else 1
