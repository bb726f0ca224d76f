"""Reads the tables of a run folder as columns: step times, metrics, curves of GPUs and host, with their means."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from wellfed.observe.telemetry.metrics import METRICS
from wellfed.observe.telemetry.series import ENERGY, HOST, TRAINING, Phase, levels

Series = npt.NDArray[np.float64]
_CHUNK_BYTES = 4 * 2**20
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Phases by the index that the column ``phase`` of `curves` has."""
_SPELT = {f",{phase},".encode(): f",{index},".encode() for index, phase in enumerate(PHASES)}
"""Phase within a row -> its number."""


def columns(path: Path) -> dict[str, Series]:
    """Returns the columns of a table of numbers, ``nan`` for an empty cell and the number of `PHASES` for a phase.
    Nothing of a missing file. An incomplete last row of a killed run is left out."""
    head: list[str] = []
    parts: list[Series] = []
    try:
        with path.open("rb") as stream:
            head = stream.readline().decode("utf-8", "replace").strip().split(",")
            while text := stream.read(_CHUNK_BYTES):
                parts.append(_rows(io.BytesIO(text + stream.readline()).readlines(), len(head)))
    except OSError:
        pass
    table = np.concatenate(parts) if parts else np.empty((0, len(head)))
    table[~np.isfinite(table)] = np.nan
    return {name: table[:, index] for index, name in enumerate(head)}


def curves(folder: Path) -> dict[int, dict[str, Series]]:
    """Returns the columns of telemetry.csv by GPU and host, with ``phase``, in all phases of the run."""
    found = columns(folder / "telemetry.csv")
    if not {"phase", "gpu"} <= found.keys():
        return {}
    of_gpu = found.pop("gpu")
    found["phase"] = np.where(np.isin(found["phase"], range(len(PHASES))), found["phase"], np.nan)
    return {
        int(gpu): {name: column[of_gpu == gpu] for name, column in found.items()}
        for gpu in np.unique(of_gpu[np.isfinite(of_gpu)])
    }


def figures(watched: Mapping[int, Mapping[str, Series]]) -> dict[int, dict[str, Any]]:
    """Returns ``{util_pct: {mean, p5, p50, p95, max, n}, ..., energy_j}`` of each GPU and host during training.

    Args:
        watched: result of `curves`.
    """
    found: dict[int, dict[str, Any]] = {}
    for gpu, curve in watched.items():
        in_training = _in_training(curve)
        for name in METRICS:
            column = curve.get(name, np.empty(0))
            is_read = np.isfinite(column)
            if name == ENERGY and is_read.any():
                # Readings are also taken when training begins and ends. The counter begins anew with a process.
                grown_j = np.maximum(np.diff(column[is_read]), 0.0)
                found.setdefault(gpu, {})[name] = float(grown_j[in_training[is_read][1:]].sum())
            elif len(values := column[in_training & is_read] if len(column) else column):
                found.setdefault(gpu, {})[name] = levels(values)
    return found


def gpu_figures(folder: Path, samples: int) -> dict[str, dict[str, Any]]:
    """Returns ``gpus`` of the record, from telemetry.csv.

    Args:
        samples: training samples so far, over all ranks.
    """
    of_gpus = {gpu: found for gpu, found in sorted(figures(curves(folder)).items()) if gpu != HOST}
    for found in of_gpus.values():
        if samples > 0 and found.get(ENERGY, 0.0) > 0:
            found["energy_per_sample_j"] = found[ENERGY] / samples
    return {str(gpu): found for gpu, found in of_gpus.items()}


def _in_training(curve: Mapping[str, Series]) -> npt.NDArray[np.bool_]:
    return np.isin(curve["phase"], [PHASES.index(phase) for phase in TRAINING])


def metric_curves(folder: Path) -> dict[tuple[str, str], tuple[Series, Series]]:
    """Returns steps and values of each metric of metrics.csv, by split and name, in order."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for split, name, step, value in _metric_rows(folder, ("split", "name", "step", "value")):
        found.setdefault((split, name), []).append((float(step), float(value or "nan")))
    tables = {key: np.array(rows).reshape(-1, 2) for key, rows in found.items()}
    return {key: (table[:, 0], table[:, 1]) for key, table in tables.items()}


def passes_ended(folder: Path) -> dict[str, Series]:
    """Returns the end of each pass over ``val`` and ``test``, in seconds since the run started, in order."""
    found: dict[str, set[float]] = {}
    for split, at_s in _metric_rows(folder, ("split", "time_s")):
        if split in ("val", "test"):
            found.setdefault(split, set()).add(float(at_s or "nan"))
    return {split: np.array(sorted(at_s for at_s in times_s if np.isfinite(at_s))) for split, times_s in found.items()}


def _metric_rows(folder: Path, names: Sequence[str]) -> Iterator[list[str]]:
    """Yields these cells of each complete row of metrics.csv."""
    try:
        with (folder / "metrics.csv").open(encoding="utf-8", errors="replace", newline="") as stream:
            rows = csv.reader(stream)
            head = next(rows, [])
            if set(names) <= set(head):
                indices = [head.index(name) for name in names]
                yield from ([row[index] for index in indices] for row in rows if len(row) == len(head))
    except OSError:
        pass


def _rows(chunk: list[bytes], width: int) -> Series:
    """Returns ``[rows, width]``, without damaged lines, and those of another width or without a line end."""
    text = b"".join(line for line in chunk if line.endswith(b"\n") and line.count(b",") == width - 1)
    for label, number in _SPELT.items():
        text = text.replace(label, number)
    text = text.replace(b"\r", b"").replace(b"\n", b",").replace(b",,", b",nan,").replace(b",,", b",nan,")
    text = b"nan" + text if text.startswith(b",") else text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # older numpy, for cells without a number
            return np.fromstring(text.removesuffix(b",").decode("ascii", "replace"), sep=",").reshape(-1, width)
    except (ValueError, DeprecationWarning):
        half = len(chunk) // 2
        if half == 0:
            return np.empty((0, width))
        return np.concatenate([_rows(chunk[:half], width), _rows(chunk[half:], width)])


@dataclass(frozen=True)
class TrainingTelemetry:
    """Readings of GPUs and host during training."""

    curves: Mapping[int, Mapping[str, Series]]
    """Columns of telemetry.csv during training, with ``time_s`` and ``step``, by GPU and ``HOST``."""
    cores: float | None
    """CPUs that the run may use; None if not measured."""
    host_cores: float | None
    """CPUs of the machine; None if not measured."""
    is_alone: bool = True
    """Whether the run has one rank. Cores of other ranks are not told apart from those of other programs."""

    def curve(self, name: str, gpu: int = HOST) -> Series:
        """Returns the readings of a figure, without missing ones."""
        found = self.curves.get(gpu, {}).get(name, np.empty(0))
        return found[np.isfinite(found)]

    def mean(self, name: str, gpu: int = HOST) -> float | None:
        """Returns the mean of `curve`; None without readings."""
        return _mean_of(self.curve(name, gpu))

    @cached_property
    def taken_cores(self) -> Series:
        """Cores of this run that other programs and its other ranks took, by reading; nan if not measured. Others that
        fit on the machine's remaining cores take nothing from the run."""
        taken = self.curves.get(HOST, {}).get("others_cpu_pct", np.empty(0)) / 100
        other_cores = 0.0 if self.cores is None else max(0.0, (self.host_cores or self.cores) - self.cores)
        return np.clip(taken - other_cores, 0.0, self.cores)

    @property
    def mean_taken_cores(self) -> float | None:
        """Mean of `taken_cores`; None without readings."""
        return _mean_of(self.taken_cores)

    @property
    def mean_others_cores(self) -> float | None:
        """Mean cores of this run that other programs took; None without readings, and with several ranks."""
        return self.mean_taken_cores if self.is_alone else None

    @property
    def gpus(self) -> list[int]:
        """Numbers of the watched GPUs."""
        return sorted(gpu for gpu in self.curves if gpu != HOST)


def _mean_of(readings: Series) -> float | None:
    known = readings[np.isfinite(readings)]
    return float(known.mean()) if len(known) else None
