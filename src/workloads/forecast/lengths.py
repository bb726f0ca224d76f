"""Derives horizon, windows and the length of an epoch from the frequency and the length of the series."""

from __future__ import annotations

import math

import numpy as np

from wellfed.units import counted
from workloads.forecast.series import SeriesSet, cut_by_time
from workloads.forecast.steps import Frequency

SEASONS = {5: (4, 8, 12), 52: (1, 2)}
"""Steps of a season -> seasons in each window. Others: (2, 3, 5) for up to 12 steps, (2, 7) for more."""
WITHOUT_SEASON = (8, 16, 32)
"""Steps of windows for series without a season."""
LONGEST = 400
"""Maximum number of steps of a derived window, which determine the time of a training step."""
TESTED_FRAC = 0.1
"""Maximum share of a series in a derived horizon, so that validation and test can be a tenth each."""
FULL_EPOCH = 4096
"""Minimum number of training windows for a single pass per epoch."""


def derived_horizon(found: SeriesSet) -> tuple[int, str]:
    """Returns the horizon and the reason: a season (a quarter of a year for weeks), at most a tenth of the series."""
    frequency, steps = found.frequency, _usual_length(found)
    season = frequency.season
    wanted = 7 if season == 1 else 13 if season == 52 else season
    why = "a quarter of a year" if season == 52 else f"a season of {counted(season, 'step')}"
    why = "no season is known" if season == 1 else why
    most = max(1, int(TESTED_FRAC * steps))
    if wanted <= most:
        return wanted, f"{why}; steps of {frequency.name}"
    return most, f"a tenth of {counted(steps, 'step')}, less than {why}"


def derived_windows(found: SeriesSet, horizon: int, val_frac: float, test_frac: float) -> tuple[tuple[int, ...], str]:
    """Returns windows of some seasons that fit the training part, and the reason."""
    wanted, why = _wanted_windows(found.frequency)
    train_end = cut_by_time(_usual_length(found), horizon, val_frac, test_frac).train_end
    fitting = tuple(window for window in wanted if window + 2 * horizon <= train_end)
    if len(fitting) == len(wanted):
        return wanted, why
    part = f"the training part has {counted(train_end, 'step')}"
    if fitting:
        return fitting, f"{why}; {part}, too few for longer ones"
    return (max(1, min(wanted[0], (train_end - horizon) // 2)),), f"{part}, too few for {why}"


def derived_passes(num_windows: int) -> tuple[int, str]:
    """Returns the passes over the windows per epoch, more for a small set, and the reason."""
    passes = max(1, math.ceil(FULL_EPOCH / num_windows))
    return passes, f"{counted(num_windows, 'training window')}; an epoch has {FULL_EPOCH:,} or more"


def _wanted_windows(frequency: Frequency) -> tuple[tuple[int, ...], str]:
    season = frequency.season
    if season == 1:
        return WITHOUT_SEASON, "no season is known"
    if season == 7:
        return (30, 60, 90), "one to three months of days"
    multiples = SEASONS.get(season, (2, 3, 5) if season <= 12 else (2, 7))
    windows = tuple(each * season for each in multiples if each * season <= LONGEST) or (min(2 * season, LONGEST),)
    shown = " and ".join(str(window // season) for window in windows)
    return windows, f"{shown} seasons of {counted(season, 'step')}"


def _usual_length(found: SeriesSet) -> int:
    return int(np.median([len(values) for values in found.values]))
