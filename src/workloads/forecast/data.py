"""Builds the forecaster's data from a CSV file or the embedded set: training windows, and rolling origins for
evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from wellfed import ConfigError, DataError, Datasets
from wellfed.units import counted
from workloads.forecast.evaluation import Forecasts
from workloads.forecast.lengths import derived_horizon, derived_passes, derived_windows
from workloads.forecast.series import FillName, SeriesSet, filled, split_by_time, trimmed
from workloads.forecast.steps import parse_frequency, show_date
from workloads.forecast.store import SeriesStore, naive_mae, row_dates
from workloads.forecast.synthetic import daily_series
from workloads.forecast.windows import SPLITS, Windows, held_out_windows, train_windows


def datasets(
    path: str | None = None,
    *,
    date_column: str | None = None,
    target: str | Sequence[str] | None = None,
    series_column: str | None = None,
    horizon: int | None = None,
    windows: Sequence[int] | None = None,
    passes: int | None = None,
    frequency: str | None = None,
    fill: FillName = "none",
    val_frac: float = 0.1,
    test_frac: float = 0.1,
    max_bad_rows: int = 100,
    decimal: str | None = None,
    day_first: bool | None = None,
    num_series: int = 20,
    num_days: int = 1500,
    seed: int = 0,
) -> Datasets:
    """Returns windows of history, each with the horizon after it; validation and test have rolling origins.

    Args:
        path: CSV file; None = the embedded set, without arguments about reading a file.
        date_column: None = a column named date, ds or similar, else the first with dates.
        target: column of values if each row belongs to a series; columns if each is a series; None = all columns of
            numbers.
        series_column: column with the series of each row. None = each column is a series, unless dates repeat and
            exactly one column distinguishes their rows.
        horizon: steps to forecast; None = one season, or less for short series.
        windows: steps of history; each origin is a training sample with each length. None = some seasons.
        passes: passes over the training windows in an epoch; None = more for fewer windows.
        frequency: D, h, 15min, B (business days), W, M and so on: dates are rounded down to it. None = inferred from
            all dates.
        fill: values of missing steps. none = ignored in loss and scores; forward = the last value; linear =
            interpolated, unless an evaluated forecast begins in the gap; zero = 0.
        val_frac: share of each series' steps for validation, before the test; 0 = none.
        test_frac: share of the last steps of each series for the test; 0 = none.
        max_bad_rows: maximum number of unreadable rows and cells to skip.
        decimal: ``.`` or ``,``, the decimal mark; None = inferred from the values.
        day_first: whether 03/04/2024 is in April; None = inferred from the other dates.
        num_series: series of the embedded set.
        num_days: days of each embedded series.
        seed: seed of the embedded set; the training has its own.

    Raises:
        DataError: the file is missing, unreadable, malformed, or too short for windows and horizon.
        ConfigError: an argument is out of range, or needs a file.
    """
    of_file: dict[str, Any] = {
        "date_column": date_column,
        "target": target,
        "series_column": series_column,
        "frequency": frequency,
        "decimal": decimal,
        "day_first": day_first,
    }
    has_windows = windows is None or (
        isinstance(windows, Sequence) and len(windows) > 0 and all(map(_is_count, windows))
    )
    has_file = path is not None
    unknown_frequency = "" if frequency is None else _unknown_frequency(frequency)
    leaves_some = not (0 <= val_frac < 1 and 0 <= test_frac < 1) or val_frac + test_frac < 1
    fills = ", ".join(get_args(FillName))
    ConfigError.check(
        "workload.data",
        ("horizon", horizon, horizon is None or _is_count(horizon), "is no number of steps above 0", "horizon=7 or so"),
        ("passes", passes, passes is None or _is_count(passes), "is no number above 0", "passes=null or 1"),
        ("windows", windows, has_windows, "is no list of numbers of steps above 0", "windows=[30,60,90] or so"),
        ("fill", fill, fill in get_args(FillName), f"is none of {fills}", "fill=none or one of the others"),
        ("val_frac", val_frac, 0 <= val_frac < 1, "is not in [0, 1)", "val_frac=0.1 or so"),
        ("test_frac", test_frac, 0 <= test_frac < 1, "is not in [0, 1)", "test_frac=0.1 or so"),
        (
            *("val_frac", val_frac, leaves_some),
            *(f"and test_frac={test_frac} leave nothing to train on", "two fractions that sum to less than 1"),
        ),
        *(
            (name, value, has_file or value is None, "has no effect on the embedded set", "path=FILE.csv with it")
            for name, value in of_file.items()
        ),
        ("max_bad_rows", max_bad_rows, max_bad_rows >= 0, "is negative", "0 to allow none"),
        (
            "decimal",
            decimal,
            decimal in (None, ".", ","),
            "is neither a point nor a comma",
            "decimal='.' or decimal=','",
        ),
        ("frequency", frequency, not unknown_frequency, unknown_frequency, "frequency=D, frequency=15min or so"),
        ("num_series", num_series, num_series >= 1, "is below 1", "num_series=1 or more"),
        ("num_days", num_days, num_days >= 1, "is below 1", "num_days=1 or more"),
        ("seed", seed, seed >= 0, "is below 0", "seed=0 or more"),
    )
    if path is None:
        passes = passes or 1  # whatever its size
        dates, values_ST, names = daily_series(num_series, num_days, seed)
        found = trimmed(names, list(values_ST), parse_frequency("D", dates[0].astype("M8[us]")))
    else:
        from workloads.forecast.read_csv import read_csv  # needs pandas

        found = read_csv(Path(path), max_bad_rows=max_bad_rows, **of_file)
    return build(
        found, horizon=horizon, windows=windows, passes=passes, fill=fill, val_frac=val_frac, test_frac=test_frac
    )


def build(
    found: SeriesSet,
    *,
    horizon: int | None = None,
    windows: Sequence[int] | None = None,
    passes: int | None = None,
    fill: FillName = "none",
    val_frac: float = 0.1,
    test_frac: float = 0.1,
) -> Datasets:
    """Splits, fills, scales and wraps series of any source."""
    derived: dict[str, tuple[Any, str]] = {}
    if horizon is None:
        horizon, reason = derived["workload.data.horizon"] = derived_horizon(found)
    if windows is None:
        windows, reason = derived_windows(found, horizon, val_frac, test_frac)
        derived["workload.data.windows"] = list(windows), reason
    windows = tuple(sorted(set(windows)))
    kept, parts = split_by_time(found, horizon=horizon, shortest=windows[0], val_frac=val_frac, test_frac=test_frac)
    measured = [~np.isnan(values) for values in kept.values]
    kept = filled(kept, parts, fill, horizon)
    store = SeriesStore(kept, parts, longest=windows[-1], horizon=horizon, measured=measured)
    train = train_windows(store, parts, windows)
    if len(train) == 0:
        raise DataError(
            f"{kept.source}: no window to train on. Wherever one ends, all of it or the whole horizon after it is "
            "missing. Fill the gaps with workload.data.fill=forward, or write a longer workload.data.horizon."
        )
    if passes is None:
        passes, reason = derived["workload.data.passes"] = derived_passes(len(train))
    held_out = {
        split: held_out_windows(store, parts, windows, split)
        for split, frac in zip(SPLITS, (val_frac, test_frac), strict=True)
        if frac
    }
    empty = [
        f"the {split} part has no value, so there is no {split}" for split, each in held_out.items() if not len(each)
    ]
    season, season_notes = _season(kept, [cut.train_end for cut in parts], windows[-1])
    naive = [
        naive_mae(np.where(seen, values, np.nan)[: cut.train_end], season)  # filled values are no error to compare with
        for values, seen, cut in zip(kept.values, measured, parts, strict=True)
    ]
    return Datasets(
        train=train.passed(passes),
        val=held_out.get("val") or None,
        test=held_out.get("test") or None,
        features=store.features(),
        evaluation=Forecasts(
            store.scale_S,
            store.center_S,
            torch.tensor(naive, dtype=torch.float64),
            season,
            horizon,
            kept.names,
            row_dates(kept, windows[-1]),
        ),
        model_args={
            "horizon": horizon,
            "num_channels": store.num_channels,
            "season": season,
            "num_series": len(kept.names),
        },
        notes=(_size(kept, train), *kept.notes, *empty, *season_notes, *_without_mase(kept.names, naive)),
        derived=derived,
    )


def _season(found: SeriesSet, train_steps: list[int], longest: int) -> tuple[int, list[str]]:
    """Returns the steps of the main season, 1 if no train part holds two seasons, and notes."""
    season = found.frequency.season
    if 2 * season > max(train_steps):
        return 1, [f"no train part holds two seasons of {season} steps; seasonal naive repeats the last value instead"]
    if season > longest:
        return season, [
            f"the longest window ({longest}) holds no season ({season} steps): where seasonal naive finds no value a "
            f"season ago, it repeats the last one; workload.data.windows=[{season}] would hold it"
        ]
    return season, []


def _without_mase(names: list[str], naive_mae: list[float]) -> list[str]:
    without = [name for name, mae in zip(names, naive_mae, strict=True) if not mae > 0]
    if not without:
        return []
    return [
        f"MASE leaves out {len(without)} of {len(names)} series, where seasonal naive makes no error in the train part "
        f"or can't be tried, the first: {without[0]}"
    ]


def _size(found: SeriesSet, train: Windows) -> str:
    steps = sum(map(len, found.values))
    starts = np.array(found.starts)
    ends = starts + [len(values) - 1 for values in found.values]
    first, last = found.frequency.dates(np.array([starts.min(), ends.max()]))
    return (
        f"{len(found.names)} series, {counted(steps, 'step')} of {found.frequency.name} from {show_date(first)} to "
        f"{show_date(last)}, {counted(len(train), 'training window')}"
    )


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _unknown_frequency(word: str) -> str:
    """Returns the problem of an unknown frequency; empty = none."""
    try:
        parse_frequency(word, np.datetime64("2024-01-01", "us"))
    except ValueError as error:
        return str(error).removeprefix(f"{word!r} ")
    return ""
