"""Reads the tables of a run folder as columns: step times, and the curves of each GPU."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]
_CHUNK = 50_000
"""Rows that are held as text at a time."""
HOST = -1
"""Stands for the host where a GPU's number is expected."""


def columns(path: Path, names: Collection[str]) -> dict[str, Series]:
    """Columns of numbers, ``nan`` for an empty cell; a column that the file lacks, and any of no file, is empty.

    A last row that a killed run left incomplete is left out.
    """
    parts: dict[str, list[Series]] = {name: [] for name in names}
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = csv.reader(stream)
            head = next(rows, [])
            places = {name: head.index(name) for name in names if name in head}
            while chunk := [row for row in islice(rows, _CHUNK) if len(row) == len(head)]:
                for name, place in places.items():
                    parts[name].append(np.array([_number(row[place]) for row in chunk]))
    except OSError:
        pass
    return {name: np.concatenate(found) if found else np.empty(0) for name, found in parts.items()}


def curves(folder: Path, names: Collection[str], phase: str = "train") -> Mapping[int, dict[str, Series]]:
    """Columns of telemetry.csv by GPU, of the readings of one phase; ``HOST`` has the host's."""
    by_gpu: dict[int, list[dict[str, str]]] = {}
    try:
        with (folder / "telemetry.csv").open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                if row.get("phase") == phase and row.get("gpu"):
                    by_gpu.setdefault(int(row["gpu"]), []).append(row)
    except OSError:
        pass
    return {
        gpu: {name: np.array([_number(row.get(name)) for row in rows]) for name in names}
        for gpu, rows in by_gpu.items()
    }


def _number(cell: str | None) -> float:
    try:
        return float(cell) if cell else np.nan
    except ValueError:
        return np.nan
