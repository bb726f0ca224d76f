"""Yields windows of history and the horizon after them, a whole batch with a few lookups.

Shapes: B samples, O origins (the first step of a forecast), S series, L steps of the longest window, H horizon, M = L +
H, C channels.
"""

from __future__ import annotations

from copy import copy
from typing import Literal

import torch
from torch import Tensor

from wellfed import FeatureModeName, FeatureSource, SampleRng
from workloads.forecast.series import Parts
from workloads.forecast.store import SeriesStore

SPLITS: tuple[Literal["val", "test"], ...] = ("val", "test")


class Windows:
    """Samples for each origin and each window length; the horizon begins at the origin.

    Args:
        row_O: row of the store L steps before each origin; ``series_O`` is its series.
        windows: lengths of history, limited to the series' past.
        split: None = training; other batches contain its index in ``SPLITS``.

    Attributes:
        passes: repetitions of each sample.
    """

    def __init__(
        self,
        store: SeriesStore,
        row_O: Tensor,
        series_O: Tensor,
        windows: tuple[int, ...],
        split: Literal["val", "test"] | None = None,
    ) -> None:
        small = torch.int32 if store.num_rows < 2**31 else torch.int64
        self._row_O, self._series_O = row_O.to(small), series_O.to(torch.int32)
        self._window_W = torch.tensor(windows)
        self._store, self._split = store, split
        self._mode: FeatureModeName = "dynamic"
        self.passes = 1

    def passed(self, passes: int) -> Windows:
        """Returns the same samples ``passes`` times, one pass after the other."""
        other = copy(self)
        other.passes = passes
        return other

    def for_features(self, mode: FeatureModeName) -> Windows:
        """Returns the same samples for a mode. With ``cache`` batches hold only indices. Else they also hold ``rows``
        [B, M, C], cut in host memory (``cache_host``) or computed (``dynamic``)."""
        other = copy(self)
        other._mode = mode
        return other

    def __len__(self) -> int:
        return self.passes * len(self._row_O) * len(self._window_W)

    def __getitem__(self, index: int, rng: SampleRng | None = None) -> dict[str, Tensor]:
        """Returns one sample, equal to a row of `fetch`."""
        batch = self.fetch(torch.tensor([range(len(self))[index]]), rng)
        return {name: values.squeeze(0) for name, values in batch.items()}

    def fetch(self, indices: Tensor, rng: SampleRng | None = None) -> dict[str, Tensor]:
        """Returns ``row``, ``series`` and ``window`` (int64 [B]), and ``rows`` unless the mode is ``cache``. Validation
        and test add ``split``, and ``target_observed`` if gaps were filled. ``rng`` is unused."""
        store = self._store
        indices = indices % (len(self._row_O) * len(self._window_W))
        origin_B = indices // len(self._window_W)
        row_B = self._row_O.index_select(0, origin_B).long()
        series_B = self._series_O.index_select(0, origin_B).long()
        past_B = row_B + store.longest - store.start_S.index_select(0, series_B)
        batch = {
            "row": row_B,
            "series": series_B,
            "window": self._window_W.index_select(0, indices % len(self._window_W)).minimum(past_B),
        }
        if self._split:
            batch["split"] = torch.full_like(series_B, SPLITS.index(self._split))
            measured_BH = store.targets_measured(row_B)
            if measured_BH is not None:  # filled values are not scored
                batch["target_observed"] = measured_BH
        if self._mode != "cache":
            batch["rows"] = (store.rows if self._mode == "dynamic" else store.held_rows)(row_B)
        return batch

    def on_device(
        self, batch: dict[str, Tensor], rng: SampleRng, features: FeatureSource | None = None
    ) -> dict[str, Tensor]:
        """Replaces ``rows`` by ``history`` [B, L, C] (zeros before the window begins), ``target`` and
        ``target_observed`` [B, H], and ``future_known`` [B, H, C - 2], the calendar of the horizon."""
        rest = {name: values for name, values in batch.items() if name != "rows"}
        rows_BMC = batch.get("rows")
        if rows_BMC is None:
            if features is None:
                raise ValueError("A batch of indices alone needs features.")
            rows_BMC = features.rows(batch["row"])
        longest = self._store.longest
        history_BLC, horizon_BHC = rows_BMC[:, :longest], rows_BMC[:, longest:]
        step_L = torch.arange(longest, device=rows_BMC.device)
        in_window_BL = step_L >= longest - batch["window"][:, None]
        return rest | {
            "history": history_BLC.masked_fill(~in_window_BL[..., None], 0.0),
            "future_known": horizon_BHC[..., 1:-1],
            "target": horizon_BHC[..., 0],
            "target_observed": batch.get("target_observed", horizon_BHC[..., -1]),
        }


def train_windows(store: SeriesStore, parts: list[Parts], windows: tuple[int, ...]) -> Windows:
    """Returns every origin of the train part with a whole shortest window before and a whole horizon after it."""
    first = min(windows)
    origins = [torch.arange(first, cut.train_end - store.horizon + 1) for cut in parts]
    return _windows(store, origins, windows, None)


def held_out_windows(
    store: SeriesStore, parts: list[Parts], windows: tuple[int, ...], split: Literal["val", "test"]
) -> Windows:
    """Returns origins one horizon apart, so that each step of the part is forecast once; history may lie in earlier
    parts."""
    ends = [(cut.train_end, cut.val_end) if split == "val" else (cut.val_end, cut.end) for cut in parts]
    return _windows(store, [torch.arange(start, end, store.horizon) for start, end in ends], windows, split)


def _windows(
    store: SeriesStore, origins: list[Tensor], windows: tuple[int, ...], split: Literal["val", "test"] | None
) -> Windows:
    """Returns the windows of all series, without origins that lack a whole shortest window or horizon."""
    first_row_O = torch.cat([origin_O + start for origin_O, start in zip(origins, store.start_S, strict=True)])
    series_O = torch.repeat_interleave(torch.tensor([len(each) for each in origins]))
    seen_N1 = _count(store.observed)
    target_N1 = seen_N1 if split is None or store.measured_N is None else _count(store.measured_N)
    has_target_O = target_N1[first_row_O + store.horizon] > target_N1[first_row_O]
    begin_O = torch.maximum(first_row_O - min(windows), store.start_S[series_O])
    has_past_O = seen_N1[first_row_O] > seen_N1[begin_O]
    kept_O = has_target_O & (has_past_O if split is None else True)
    return Windows(store, (first_row_O - store.longest)[kept_O], series_O[kept_O], windows, split)


def _count(there_N: Tensor) -> Tensor:
    """Returns the number of True rows before each row, [N + 1]."""
    return torch.cat([torch.zeros(1, dtype=torch.long), there_N.cumsum(0)])
