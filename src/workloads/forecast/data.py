"""Makes the forecaster's data of a CSV file or the embedded set: windows to train on, rolling origins to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from wellfed.contract import Datasets
from wellfed.errors import ConfigError, DataError, Fault
from wellfed.units import counted
from workloads.forecast.evaluation import Forecasts
from workloads.forecast.series import FillName, SeriesSet, filled, split_by_time, trimmed
from workloads.forecast.steps import parse_frequency, show_date
from workloads.forecast.store import SeriesStore, naive_mae
from workloads.forecast.synthetic import daily_series
from workloads.forecast.windows import Windows, held_out_windows, train_windows


def datasets(
    path: str | None = None,
    *,
    horizon: int = 7,
    windows: Sequence[int] = (30, 60, 90),
    fill: FillName = "none",
    val_frac: float = 0.1,
    test_frac: float = 0.1,
    num_series: int = 20,
    num_days: int = 1500,
    seed: int = 0,
) -> Datasets:
    dates, values_ST, names = daily_series(num_series, num_days, seed)
    frequency = parse_frequency("D", dates[0].astype("M8[us]"))
    found = trimmed(names, list(values_ST), 0, frequency)
    return build(found, horizon=horizon, windows=tuple(windows), fill=fill, val_frac=val_frac, test_frac=test_frac)


def build(
    found: SeriesSet,
    *,
    horizon: int,
    windows: tuple[int, ...],
    fill: FillName = "none",
    val_frac: float = 0.1,
    test_frac: float = 0.1,
) -> Datasets:
    """Split, fill, scale and wrap series of any source."""
    windows = tuple(sorted(set(windows)))
    kept, parts = split_by_time(found, horizon=horizon, shortest=windows[0], val_frac=val_frac, test_frac=test_frac)
    kept = filled(kept, parts, fill, horizon)
    store = SeriesStore(kept, parts, longest=windows[-1], horizon=horizon)
    train = train_windows(store, parts, windows)
    if len(train) == 0:
        raise DataError(
            "No window to train on: wherever one ends, all of it or the whole horizon after it is missing. "
            "Fill the gaps with workload.data.fill=forward, or write a longer workload.data.horizon."
        )
    val = held_out_windows(store, parts, windows, "val") if val_frac else None
    test = held_out_windows(store, parts, windows, "test") if test_frac else None
    season, season_notes = _season(kept, [cut.train_end for cut in parts], windows[-1])
    naive = [naive_mae(values[: cut.train_end], season) for values, cut in zip(kept.values, parts, strict=True)]
    return Datasets(
        train=train,
        val=val if val is not None and len(val) else None,
        test=test if test is not None and len(test) else None,
        features=store.features(),
        evaluation=Forecasts(
            store.scale_S, store.center_S, torch.tensor(naive), season, horizon, kept.names, store.dates
        ),
        model_args={
            "horizon": horizon,
            "num_channels": store.num_channels,
            "season": season,
            "num_series": len(kept.names),
        },
        notes=(_size(kept, train), *kept.notes, *season_notes),
    )


def _season(found: SeriesSet, train_steps: list[int], longest: int) -> tuple[int, list[str]]:
    """Steps of the main season: 1 where no train part holds two; what is to be said of it."""
    season = found.frequency.season
    if 2 * season > max(train_steps):
        return 1, [f"no train part holds two seasons of {season} steps; seasonal naive repeats the last value instead"]
    if season > longest:
        return season, [
            f"the longest window ({longest}) holds no season ({season} steps); workload.data.windows=[{season}] would"
        ]
    return season, []


def _size(found: SeriesSet, train: Windows) -> str:
    steps = sum(map(len, found.values))
    starts = np.array(found.starts)
    ends = starts + [len(values) - 1 for values in found.values]
    first, last = found.frequency.dates(np.array([starts.min(), ends.max()]))
    return (
        f"{len(found.names)} series, {counted(steps, 'step')} of {found.frequency.name} from {show_date(first)} to "
        f"{show_date(last)}, {counted(len(train), 'training window')}"
    )
