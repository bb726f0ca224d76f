"""The figures of a run from its step rows: rate with its interval, shares of time, readiness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, stdev

from wellfed.timing.phases import StepRow

_NUM_BLOCKS = 20


@dataclass(frozen=True)
class StepSummary:
    """What the steps after the warm-up say."""

    steps: int
    warmup_steps: int
    samples_per_s: float
    ci95: tuple[float, float] | None
    """95 % interval of samples_per_s from blocks of steps, which forgives steps that follow one another alike; None
    with fewer than 2 blocks of 5 steps."""
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
    steps_ms = sorted(row.step_ms for row in kept)
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
        step_ms_p50=quantile(steps_ms, 0.50),
        step_ms_p95=quantile(steps_ms, 0.95),
    )


def rate_interval(rows: Sequence[StepRow]) -> tuple[float, float] | None:
    """95 % interval of samples/s from up to 20 blocks of at least 5 successive steps.

    The rate is a ratio of two sums, so its error is that of the blocks' samples about rate x time: the mean of the
    blocks' own rates would give a stalled block the weight of a fast one, and may leave the rate out of its interval.
    """
    num_blocks = min(_NUM_BLOCKS, len(rows) // 5)
    if num_blocks < 2:
        return None
    edges = [round(block * len(rows) / num_blocks) for block in range(num_blocks + 1)]
    blocks = [rows[low:high] for low, high in pairwise(edges)]
    times_s = [sum(row.step_ms for row in block) / 1e3 for block in blocks]
    samples = [sum(row.samples for row in block) for block in blocks]
    if sum(times_s) <= 0:
        return None
    rate = sum(samples) / sum(times_s)
    errors = [count - rate * time_s for count, time_s in zip(samples, times_s, strict=True)]
    half = student_t_975(num_blocks - 1) * stdev(errors) / math.sqrt(num_blocks) / fmean(times_s)
    return max(0.0, rate - half), rate + half


def student_t_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, within 0.5 % from 2 degrees on; exact at 1 (Cornish-Fisher expansion,
    Abramowitz and Stegun 26.7.5)."""
    if degrees == 1:
        return 12.706
    if degrees == 2:
        return 4.303
    z = NormalDist().inv_cdf(0.975)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / degrees + g2 / degrees**2 + g3 / degrees**3 + g4 / degrees**4


def quantile(ordered: Sequence[float], share: float) -> float:
    """The ``share`` quantile of ascending values, linear between neighbours."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
