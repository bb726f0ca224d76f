"""Reads the learning curve of a whole training from the ``metrics.csv`` of its run folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wellfed.explain.diagnosis.run_tables import metric_curves


@dataclass(frozen=True)
class CurvePoint:
    """The metric at one validation."""

    step: int
    """Optimizer steps until then."""
    value: float


def read_curve(folder: Path, metric: str) -> list[CurvePoint]:
    """Returns the metric at each validation, in order; empty where nothing was validated or the file is unreadable."""
    steps, values = metric_curves(folder).get(("val", metric), ((), ()))
    found = {int(step): float(value) for step, value in zip(steps, values, strict=True) if math.isfinite(step)}
    return [CurvePoint(step, value) for step, value in sorted(found.items())]


def reported_metrics(folder: Path) -> list[str]:
    """Returns the names of all metrics of validation."""
    return sorted(name for split, name in metric_curves(folder) if split == "val")


def best_point(curve: Sequence[CurvePoint], *, higher_is_better: bool) -> CurvePoint | None:
    """Returns the last of the best points, as ``best.ckpt`` is; None where no value is finite.

    ``metrics.csv`` has six digits. Values that differ beyond them count as equal.
    """
    finite = [point for point in curve if math.isfinite(point.value)]
    if not finite:
        return None
    return max(finite, key=lambda point: (point.value if higher_is_better else -point.value, point.step))
