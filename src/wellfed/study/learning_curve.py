"""Reads the learning curve of a whole training from the ``metrics.csv`` of its run folder."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wellfed.record import regular


@dataclass(frozen=True)
class CurvePoint:
    """The metric at one validation."""

    step: int
    """Optimizer steps until then."""
    value: float


def read_curve(folder: Path, metric: str) -> list[CurvePoint]:
    """Returns the metric at each validation, in order; empty where nothing was validated or the file is unreadable."""
    found: dict[int, float] = {}
    with suppress(OSError, ValueError, TypeError, KeyError, csv.Error):  # a line cut by a kill ends the curve
        for row in _validations(folder):
            if row.get("name") == metric:
                found[int(row["step"])] = float(row["value"])
    return [CurvePoint(step, value) for step, value in sorted(found.items())]


def reported_metrics(folder: Path) -> list[str]:
    """Returns the names of all metrics of validation."""
    with suppress(OSError, ValueError, KeyError, csv.Error):
        return sorted({str(row["name"]) for row in _validations(folder)})
    return []


def _validations(folder: Path) -> Iterator[dict[str, str]]:
    with regular(folder / "metrics.csv").open(encoding="utf-8", newline="") as stream:
        yield from (row for row in csv.DictReader(stream) if row.get("split") == "val")


def best_point(curve: Sequence[CurvePoint], *, higher_is_better: bool) -> CurvePoint | None:
    """Returns the last of the best points, as ``best.ckpt`` is; None where no value is finite.

    ``metrics.csv`` has six digits. Values that differ beyond them count as equal.
    """
    finite = [point for point in curve if math.isfinite(point.value)]
    if not finite:
        return None
    return max(finite, key=lambda point: (point.value if higher_is_better else -point.value, point.step))
