"""Draws daily series with a weekly and a yearly pattern, a trend and noise, so that the example runs offline.

They resemble sales of several kinds of shops. Shops of one kind share a weekly pattern. Each has its own size, growth,
yearly pattern and noise. Noise is autocorrelated, with a few outliers, and levels shift. So smoothing helps, and the
seasonal naive forecast is a fair baseline.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FIRST_DAY = np.datetime64("2019-01-01")
WEEK, YEAR = 7, 365.25
KINDS = 4
"""Number of weekly patterns, each shared by several series."""

Floats = NDArray[np.float64]


def daily_series(
    num_series: int, num_days: int, seed: int
) -> tuple[NDArray[np.datetime64], NDArray[np.float64], list[str]]:
    """Draws the set.

    Args:
        num_series: S; with equal ``seed`` and T, the first series are the same for any S.
        num_days: T, from 1 January 2019.
        seed: seed of the set; equal arguments give equal sets.

    Returns:
        Dates [T] by the day, values above 0 [S, T], and a name for each series.
    """
    dates = FIRST_DAY + np.arange(num_days).astype("m8[D]")
    week_KW = _weeks(np.random.default_rng([seed, 0]))
    rows = [_series(np.random.default_rng([seed, 1 + number]), num_days, week_KW) for number in range(num_series)]
    values_ST = np.stack(rows) if rows else np.zeros((0, num_days))
    width = len(str(max(num_series - 1, 0)))
    return dates, values_ST, [f"shop_{number:0{width}}" for number in range(num_series)]


def _weeks(rng: np.random.Generator) -> Floats:
    """Returns logarithms of a day's share of the week's mean, [KINDS, WEEK]."""
    week_KW = rng.normal(0.0, 0.25, (KINDS, WEEK))
    return np.asarray(week_KW - week_KW.mean(1, keepdims=True))


def _series(rng: np.random.Generator, num_days: int, week_KW: Floats) -> Floats:
    """Draws one series, [T]: the exponential of size + growth + year + week + shifts + noise."""
    day_T = np.arange(num_days)
    size, growth = rng.normal(np.log(100.0), 0.8), rng.normal(0.0, 0.08) * day_T / YEAR
    phase, height = rng.uniform(0, 2 * np.pi, 2), rng.uniform(0.05, 0.3) * np.array([1.0, 0.4])
    turn_T = 2 * np.pi * day_T / YEAR
    year_T = height[0] * np.sin(turn_T + phase[0]) + height[1] * np.sin(2 * turn_T + phase[1])
    week_W = week_KW[rng.integers(KINDS)] + rng.normal(0.0, 0.05, WEEK)
    shift_T = np.cumsum(rng.normal(0.0, 0.15, num_days) * (rng.random(num_days) < 1 / 400))
    logarithm_T = size + growth + year_T + week_W[day_T % WEEK] + shift_T + _noise(rng, num_days)
    return np.asarray(np.exp(logarithm_T))


def _noise(rng: np.random.Generator, num_days: int) -> Floats:
    """Draws autocorrelated noise, [T], with an outlier every hundred days on average."""
    memory, spread = rng.uniform(0.3, 0.8), rng.uniform(0.05, 0.12)
    shock_T = rng.normal(0.0, spread * np.sqrt(1 - memory**2), num_days)
    noise_T = np.zeros(num_days)
    for day in range(1, num_days):
        noise_T[day] = memory * noise_T[day - 1] + shock_T[day]
    outlier_T = (rng.random(num_days) < 0.01) * rng.normal(0.0, 4 * spread, num_days)
    return np.asarray(noise_T + outlier_T)
