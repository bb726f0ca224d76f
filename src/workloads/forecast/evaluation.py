"""Scores forecasts of rolling origins by MAE, RMSE and MASE, with the seasonal naive forecast for comparison.

Shapes: B samples of a batch, N samples of the split, O origins, S series, L steps of history, H horizon.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wellfed import FeatureSource
from workloads.forecast.seasonal_naive import seasonal_naive

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SPLITS = ("val", "test")
KEYS = ("series", "origin", "window", "split")
"""Integers that identify a sample, stored in columns before its 4 H numbers."""


class Forecasts:
    """Scores of forecasts: MAE and RMSE over all steps in the data's units; MASE as the mean over series.

    MASE is a series' MAE divided by the MAE of the seasonal naive forecast, one step ahead, in its train part (Hyndman
    & Koehler 2006, https://doi.org/10.1016/j.ijforecast.2006.03.001). Series with a divisor of 0 are left out. An
    origin with several windows is forecast by their mean. Predictions stay on the device; ``compute`` moves them to the
    host at once.

    Args:
        scale_S: divisor of each series (standard deviation); ``center_S`` was subtracted before.
        naive_mae_S: MAE of the seasonal naive forecast in each series' train part, in the data's units.
        season: steps of the main season; the longest window should hold one.
        dates: dates of the rows of the store, for the table; None = the table has row numbers.
    """

    best_metric = "mase"
    best_mode: Literal["max", "min"] = "min"

    def __init__(
        self,
        scale_S: Tensor,
        center_S: Tensor,
        naive_mae_S: Tensor,
        season: int,
        horizon: int,
        names: list[str],
        dates: NDArray[np.datetime64] | None = None,
    ) -> None:
        self.scale_S = scale_S.double().numpy()
        self.center_S = center_S.double().numpy()
        self.naive_mae_S = naive_mae_S.double().numpy()
        self.season, self.horizon, self.names, self.dates = season, horizon, names, dates
        self.reset()

    def reset(self) -> None:
        """Clears all forecasts."""
        self._batches: list[Tensor] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: dict[str, Tensor], /, *features: FeatureSource) -> None:
        """Forecasts the samples of a batch from ``on_device``.

        The batch has ``history`` [B, L, C] (values first, observed last), ``target`` and ``target_observed`` [B, H],
        ``series``, ``row`` and ``window`` [B]. It may have ``split`` [B], an index in `SPLITS`. The forecast begins at
        row ``row + L`` of the store, which is the same for all windows of an origin.
        """
        predict = cast(Callable[[dict[str, Tensor]], Tensor], model)
        history_BLC = batch["history"]
        naive_BH = seasonal_naive(history_BLC[..., 0], history_BLC[..., -1], self.season, self.horizon)
        series_B = batch["series"]
        split_B = batch.get("split", torch.full_like(series_B, -1))
        keys = (series_B, batch["row"] + history_BLC.shape[1], batch["window"], split_B)
        numbers = (predict(batch), naive_BH, batch["target"], batch["target_observed"])
        # Doubles hold row numbers exactly, and one tensor needs one transfer.
        columns = [torch.stack(keys, 1).double(), *(each_BH.double() for each_BH in numbers)]
        self._batches.append(torch.cat(columns, 1))

    def state(self) -> list[Tensor]:
        """Returns the numbers of each batch."""
        return self._batches

    def merge(self, states: Sequence[list[Tensor]]) -> None:
        """Replaces the batches by those of all ranks, in the order of the split."""
        in_turn = itertools.zip_longest(*states)
        self._batches = [each for batches in in_turn for each in batches if each is not None]

    def compute(self) -> dict[str, float]:
        """Returns the metrics over all origins since `reset`; NaN without scores."""
        found = self._gather()
        metrics = {}
        for suffix, error_OH in found.errors().items():
            metrics[f"mae{suffix}"] = _mean(error_OH)
            metrics[f"rmse{suffix}"] = _mean(error_OH**2) ** 0.5
            metrics[f"mase{suffix}"] = _mean(self._mase_by_series(error_OH, found.series))
        return metrics

    def artifacts(self, folder: Path) -> dict[str, Path]:
        """Writes ``forecasts_<split>.csv``, a row per step of each origin, and ``series_<split>.csv``, a row per
        series."""
        found = self._gather()
        if len(found.series) == 0:
            return {}
        split = SPLITS[found.split] if found.split >= 0 else "all"
        tables = {f"forecasts_{split}": self._steps(found), f"series_{split}": self._series(found)}
        paths = {name: folder / f"{name}.csv" for name in tables}
        for name, rows in tables.items():
            with paths[name].open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
        return paths

    def _gather(self) -> _Origins:
        """Returns all origins so far in the data's units, with one transfer from the device."""
        width = len(KEYS) + 4 * self.horizon
        table = torch.cat(self._batches).cpu().numpy() if self._batches else np.zeros((0, width))
        key_NK, numbers_N4H = table[:, : len(KEYS)].astype(np.int64), table[:, len(KEYS) :]
        forecast_NH, naive_NH, target_NH, seen_NH = np.split(numbers_N4H, 4, axis=1)
        key_OK, sample_N = np.unique(key_NK[:, :2], axis=0, return_inverse=True)
        sample_N = sample_N.reshape(-1)
        # Windows of an origin share some values, which are taken from the longest.
        by_window_N = np.argsort(key_NK[:, 2], kind="stable")
        longest_O = np.zeros(len(key_OK), np.int64)
        longest_O[sample_N[by_window_N]] = by_window_N
        forecast_OH = np.zeros((len(key_OK), self.horizon))
        np.add.at(forecast_OH, sample_N, forecast_NH)
        forecast_OH /= np.bincount(sample_N, minlength=len(key_OK))[:, None]
        series_O = key_OK[:, 0]
        scale_O1, center_O1 = self.scale_S[series_O, None], self.center_S[series_O, None]
        return _Origins(
            series=series_O,
            rows=key_OK[:, 1],
            split=int(key_NK[0, 3]) if len(key_NK) else -1,
            forecasts={
                "": forecast_OH * scale_O1 + center_O1,
                "_seasonal_naive": naive_NH[longest_O] * scale_O1 + center_O1,
            },
            target=target_NH[longest_O] * scale_O1 + center_O1,
            seen=seen_NH[longest_O] > 0,
        )

    def _mase_by_series(self, error_OH: Floats, series_O: Ints) -> Floats:
        """Returns the MASE of each series, [S]; NaN for a series without forecasts or without a naive error."""
        mase_S = np.full(len(self.names), np.nan)
        for series in np.unique(series_O):
            if self.naive_mae_S[series] > 0:
                mase_S[series] = _mean(error_OH[series_O == series]) / self.naive_mae_S[series]
        return mase_S

    def _steps(self, found: _Origins) -> Iterator[Sequence[object]]:
        yield (
            "series",
            "date" if self.dates is not None else "row",
            "step",
            "target",
            *map("forecast{}".format, found.forecasts),
        )
        for origin, step in np.argwhere(found.seen):
            row = found.rows[origin] + step
            yield (
                self.names[found.series[origin]],
                row if self.dates is None else np.datetime_as_string(self.dates[row], unit="auto"),
                step + 1,
                found.target[origin, step],
                *(forecast_OH[origin, step] for forecast_OH in found.forecasts.values()),
            )

    def _series(self, found: _Origins) -> Iterator[Sequence[object]]:
        names = [f"{metric}{suffix}" for suffix in found.forecasts for metric in ("mae", "mase")]
        yield "series", "origins", *names
        errors = list(found.errors().values())
        mases = [self._mase_by_series(error_OH, found.series) for error_OH in errors]
        for series in np.unique(found.series):
            mine_O = found.series == series
            pairs = ((_mean(error_OH[mine_O]), mase_S[series]) for error_OH, mase_S in zip(errors, mases, strict=True))
            yield self.names[series], int(mine_O.sum()), *itertools.chain.from_iterable(pairs)


@dataclass(frozen=True)
class _Origins:
    """All forecasts, sorted by series and time, in the units of the data."""

    series: Ints
    """Number of each origin's series, [O]."""
    rows: Ints
    """Row of the store where each forecast begins, [O]."""
    split: int
    forecasts: dict[str, Floats]
    """Suffix of a metric -> forecasts [O, H]."""
    target: Floats
    """Measured values, [O, H]."""
    seen: NDArray[np.bool_]

    def errors(self) -> dict[str, Floats]:
        """Returns suffix -> absolute errors [O, H]: NaN where nothing was measured, infinite for a NaN forecast."""
        errors = {}
        for suffix, forecast_OH in self.forecasts.items():
            error_OH = np.abs(forecast_OH - self.target)
            errors[suffix] = np.where(self.seen, np.where(np.isnan(error_OH), np.inf, error_OH), np.nan)
        return errors


def _mean(values: Floats) -> float:
    """Returns the mean without NaN; NaN without values."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
