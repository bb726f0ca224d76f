"""Reads the learning curve of a trial from the ``metrics.csv`` of its run folder."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CurvePoint:
    """A figure of one validation."""

    step: int
    """Optimizer steps until then."""
    value: float


def read_curve(folder: Path, metric: str) -> list[CurvePoint]:
    """The metric at each validation, in order; empty where nothing was validated or the file can't be read."""
    found: dict[int, float] = {}
    try:
        with (folder / "metrics.csv").open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                if row.get("split") == "val" and row.get("name") == metric:
                    found[int(row["step"])] = float(row["value"])
    except (OSError, ValueError, TypeError, KeyError, csv.Error):  # a line that a kill has cut ends it
        pass
    return [CurvePoint(step, value) for step, value in sorted(found.items())]


def reported_metrics(folder: Path) -> list[str]:
    """Names of all that validation has given."""
    try:
        with (folder / "metrics.csv").open(encoding="utf-8", newline="") as stream:
            rows = csv.DictReader(stream)
            return sorted({str(row["name"]) for row in rows if row.get("split") == "val"})
    except (OSError, ValueError, KeyError, csv.Error):
        return []


def best_point(curve: Sequence[CurvePoint], *, higher_is_better: bool) -> CurvePoint | None:
    """The first of the best; None where none is a finite number."""
    finite = [point for point in curve if math.isfinite(point.value)]
    if not finite:
        return None
    return max(finite, key=lambda point: (point.value if higher_is_better else -point.value, -point.step))
