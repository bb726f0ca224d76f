"""Computes the figures of a run from its step rows: rate with its interval, shares of time, readiness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wellfed.timing.interval import half_width
from wellfed.timing.step_clock import StepRow


@dataclass(frozen=True)
class StepSummary:
    """What the steps after the warm-up say."""

    steps: int
    warmup_steps: int
    samples_per_s: float
    ci95: tuple[float, float] | None
    """95 % interval of samples_per_s; None with too few steps (see `interval`)."""
    readiness_frac: float
    wait_frac: float
    copy_frac: float | None
    """None where there is no copy to a device."""
    compute_frac: float
    host_frac: float
    step_ms_p50: float
    step_ms_p95: float


def summarise(rows: Sequence[StepRow]) -> StepSummary | None:
    """Figures over the rows that are not warm-up; None if there are none."""
    kept = [row for row in rows if not row.warmup]
    total_ms = sum(row.step_ms for row in kept)
    if not kept or total_ms <= 0:
        return None
    p50, p95 = np.quantile([row.step_ms for row in kept], (0.50, 0.95))
    has_copy = any(row.copy_ms is not None for row in kept)
    return StepSummary(
        steps=len(kept),
        warmup_steps=len(rows) - len(kept),
        samples_per_s=1e3 * sum(row.samples for row in kept) / total_ms,
        ci95=rate_interval(kept),
        readiness_frac=sum(row.ready for row in kept) / len(kept),
        wait_frac=sum(row.wait_ms for row in kept) / total_ms,
        copy_frac=sum(row.copy_ms or 0.0 for row in kept) / total_ms if has_copy else None,
        compute_frac=sum(row.compute_ms for row in kept) / total_ms,
        host_frac=sum(row.host_ms for row in kept) / total_ms,
        step_ms_p50=float(p50),
        step_ms_p95=float(p95),
    )


def rate_interval(rows: Sequence[StepRow]) -> tuple[float, float] | None:
    """95 % interval of samples/s, not below 0; None with too few steps (see `interval`)."""
    times_s = [row.step_ms / 1e3 for row in rows]
    samples = [row.samples for row in rows]
    half = half_width(samples, times_s)
    if half is None:
        return None
    rate = sum(samples) / sum(times_s)
    return max(0.0, rate - half), rate + half
