"""Reads the tables of a run folder as columns: step times, metrics, and the curves of each GPU and of the host."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]
_CHUNK_BYTES = 4 * 2**20
"""Text that is held at a time."""
HOST = -1
"""Stands for the host where a GPU's number is expected."""


def columns(path: Path, names: Collection[str]) -> dict[str, Series]:
    """Columns of a table of numbers, ``nan`` for an empty cell; a column that the file lacks, and any of no file, is
    empty.

    A last row that a killed run left incomplete is left out.
    """
    parts: dict[str, list[Series]] = {name: [] for name in names}
    try:
        with path.open("rb") as stream:
            head = _cells(stream.readline())
            places = {name: head.index(name) for name in names if name in head}
            while places and (lines := stream.readlines(_CHUNK_BYTES)):
                rows = _rows(lines, len(head))
                for name, place in places.items():
                    parts[name].append(rows[:, place].copy())
    except OSError:
        pass
    return {name: np.concatenate(found) if found else np.empty(0) for name, found in parts.items()}


def curves(folder: Path, names: Collection[str], phase: str = "train") -> Mapping[int, dict[str, Series]]:
    """Columns of telemetry.csv by GPU, of the readings of one phase; ``HOST`` has the host's."""
    by_gpu: dict[int, list[list[str]]] = {}
    places: dict[str, int] = {}
    try:
        with (folder / "telemetry.csv").open(encoding="utf-8", errors="replace", newline="") as stream:
            rows = csv.reader(stream)
            head = next(rows, [])
            places = {name: place for place, name in enumerate(head)}
            if {"phase", "gpu"} <= places.keys():
                of_phase, of_gpu = places["phase"], places["gpu"]
                for row in rows:
                    if len(row) == len(head) and row[of_phase] == phase and _is_number(row[of_gpu]):
                        by_gpu.setdefault(int(row[of_gpu]), []).append(row)
    except OSError:
        pass
    return {
        gpu: {name: np.array([_number(row[places[name]]) for row in rows]) for name in names if name in places}
        for gpu, rows in by_gpu.items()
    }


def metric_series(folder: Path, name: str, split: str = "train") -> tuple[Series, Series]:
    """Steps and values of one metric of metrics.csv, in order; empty where there is none."""
    found: list[tuple[float, float]] = []
    try:
        with (folder / "metrics.csv").open(encoding="utf-8", errors="replace", newline="") as stream:
            found += [
                (_number(row.get("step")), _number(row.get("value")))
                for row in csv.DictReader(stream)
                if row.get("name") == name and row.get("split") == split
            ]
    except OSError:
        pass
    table = np.array(found).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _rows(lines: list[bytes], width: int) -> Series:
    """``[rows, width]``; lines of another width, or without their end, are left out."""
    whole = [line for line in lines if line.endswith(b"\n") and line.count(b",") == width - 1]
    text = b"".join(whole).replace(b"\r", b"").replace(b"\n", b",").replace(b",,", b",nan,").replace(b",,", b",nan,")
    text = b"nan" + text if text.startswith(b",") else text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # what an older numpy does at a cell that is no number
            return np.fromstring(text.removesuffix(b",").decode("ascii", "replace"), sep=",").reshape(-1, width)
    except (ValueError, DeprecationWarning):
        cells = [[_number(cell) for cell in _cells(line)] for line in whole]
        return np.array([row for row in cells if len(row) == width]).reshape(-1, width)


def _cells(line: bytes) -> list[str]:
    return next(csv.reader([line.decode("utf-8", "replace")]), [])


def _is_number(cell: str) -> bool:
    return cell.lstrip("-").isdigit()


def _number(cell: str | None) -> float:
    try:
        return float(cell) if cell else np.nan
    except ValueError:
        return np.nan
