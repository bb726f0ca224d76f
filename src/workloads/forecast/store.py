"""Stores scaled series one after the other in one tensor, to cut windows from without copies.

Shapes: N rows of the store, M steps of a window and its horizon, K calendar periods, C = 2 + 2 K channels, P phases, B
windows.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from wellfed import Features
from workloads.forecast.series import Flags, Floats, Parts, SeriesSet
from workloads.forecast.steps import Calendar, Dates


class SeriesStore:
    """All scaled series with their calendar, held as one tensor or computed for each batch.

    A row of the store is one step: the scaled value, sine and cosine of each calendar period, and 1 if the value is
    present. Missing values have 0 in both. Empty rows before the first series give every forecast a whole window.

    Args:
        longest: L, steps of the longest window.
        measured: whether each step had a value before gaps were filled; None = nothing was filled.
    """

    def __init__(
        self,
        found: SeriesSet,
        parts: list[Parts],
        *,
        longest: int,
        horizon: int,
        measured: list[Flags] | None = None,
    ) -> None:
        self.longest, self.horizon = longest, horizon
        scales = [_scale(values[: cut.train_end]) for values, cut in zip(found.values, parts, strict=True)]
        self.center_S = torch.tensor([center for center, _ in scales], dtype=torch.float64)
        self.scale_S = torch.tensor([scale for _, scale in scales], dtype=torch.float64)
        """Standard deviation of each series' train part; 1 instead of 0."""
        lengths = [len(values) for values in found.values]
        self.start_S = torch.from_numpy(longest + np.cumsum([0, *lengths[:-1]]))
        """Row of each series' first step."""
        empty = np.full(longest, np.nan)
        scaled = [(values - center) / scale for values, (center, scale) in zip(found.values, scales, strict=True)]
        self._value_N = torch.from_numpy(np.concatenate([empty, *scaled]).astype(np.float32))
        self.measured_N: Tensor | None = None
        """Whether each row was measured before gaps were filled, bool [N]; None = nothing was filled."""
        if measured is not None and not all(map(np.all, measured)):
            self.measured_N = torch.from_numpy(np.concatenate([np.zeros(longest, bool), *measured]))
        calendar = Calendar(found.frequency)
        self._phase_NK, self._table_P2 = calendar.phases(row_dates(found, longest)), calendar.table_P2

    @property
    def num_channels(self) -> int:
        """Number of channels C."""
        return 2 + 2 * self._phase_NK.shape[1]

    @property
    def num_rows(self) -> int:
        """Number of possible windows, each identified by its first row."""
        return len(self._value_N) - self._steps + 1

    @property
    def observed(self) -> Tensor:
        """Whether each row has a value, bool [N]."""
        return ~self._value_N.isnan()

    @property
    def _steps(self) -> int:
        return self.longest + self.horizon

    def table(self) -> Tensor:
        """Returns the whole store, float32 [N, C]."""
        return self._channels(self._value_N, self._phase_NK)

    @cached_property
    def held_table(self) -> Tensor:
        """The cached `table`, from which windows are cut in host memory."""
        return self.table()

    def rows(self, indices: Tensor) -> Tensor:
        """Computes the windows that begin at these rows: float32 [B, M, C] on the CPU."""
        indices = indices.cpu()
        return self._channels(_cut(self._value_N, indices, self._steps), _cut(self._phase_NK, indices, self._steps))

    def targets_measured(self, indices: Tensor) -> Tensor | None:
        """Returns 1 for each measured step of the windows' horizons, float32 [B, H]; None if nothing was filled."""
        if self.measured_N is None:
            return None
        return _cut(self.measured_N, indices + self.longest, self.horizon).float()

    def cut(self, table_NC: Tensor, indices: Tensor) -> Tensor:
        """Cuts the windows from a `table`, on its device."""
        return _cut(table_NC, indices, self._steps)

    def held_rows(self, indices: Tensor) -> Tensor:
        """Cuts the windows from `held_table`; equal to `rows`."""
        return self.cut(self.held_table, indices)

    def features(self) -> Features:
        """Returns the features that the engine may hold in device or host memory."""
        size = len(self._value_N) * self.num_channels * 4
        return Features(self.num_rows, size, self.rows, store=self.table, cut=self.cut)

    def _channels(self, value: Tensor, phase_K: Tensor) -> Tensor:
        """Returns channels [..., C] for values [...] and phases [..., K]."""
        calendar = self._table_P2.index_select(0, phase_K.flatten().int()).view(*value.shape, -1)
        missing = value.isnan()
        return torch.cat([value.masked_fill(missing, 0.0)[..., None], calendar, (~missing)[..., None].float()], dim=-1)


def _cut(rows_N: Tensor, indices: Tensor, steps: int) -> Tensor:
    """Returns successive rows [B, steps, ...] from each index, selected from a view of overlapping windows."""
    shape, stride = rows_N.shape, rows_N.stride()
    windows = rows_N.as_strided((shape[0] - steps + 1, steps, *shape[1:]), (stride[0], *stride))
    return windows.index_select(0, indices)


def row_dates(found: SeriesSet, longest: int) -> Dates:
    """Returns the date of each row of the store, [N]. Empty rows have the first date of the first series."""
    numbers = [start + np.arange(len(values)) for start, values in zip(found.starts, found.values, strict=True)]
    return found.frequency.dates(np.concatenate([np.full(longest, found.starts[0]), *numbers]))


def _scale(train_T: Floats) -> tuple[float, float]:
    """Returns mean and standard deviation of the present values; 0 and 1 without any."""
    known = train_T[~np.isnan(train_T)]
    if len(known) == 0:
        return 0.0, 1.0
    spread = float(known.std())
    # Smaller spreads are rounding errors of the sum, or below the range of float32.
    return float(known.mean()), spread if spread > max(1e-30, 1e-12 * float(np.abs(known).max())) else 1.0


def naive_mae(train_T: Floats, season: int) -> float:
    """Returns the mean absolute difference of values a season apart, in their units; NaN without a pair."""
    if len(train_T) <= season:
        return float("nan")
    gap_T = np.abs(train_T[season:] - train_T[:-season])
    known = gap_T[~np.isnan(gap_T)]
    return float(known.mean()) if len(known) else float("nan")
