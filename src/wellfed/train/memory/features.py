"""Provides a workload's feature rows: from a table on the device or in host memory, or computed each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from wellfed.contract import FEATURE_MODES, FeatureModeName, Features, FeatureSource
from wellfed.record.entries import OnEvent
from wellfed.train.memory import oom

CHUNK_ROWS = 256
"""Rows computed at a time to fill a table. A GPT-2 base over 64 tokens needs about 0.3 GiB for them."""


class DeviceTable:
    """All rows on the training device, or the data that they are cut from."""

    def __init__(self, table: Tensor, cut: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        self.table, self._cut = table, cut

    def rows(self, indices: Tensor) -> Tensor:
        """Gathers rows on the device."""
        return self.table.index_select(0, indices) if self._cut is None else self._cut(self.table, indices)


class HostTable:
    """All rows in host memory, page-locked with a GPU. Each request is gathered there and copied."""

    def __init__(self, table: Tensor, device: torch.device) -> None:
        self._device = device
        self.table = table.pin_memory() if device.type == "cuda" else table

    def rows(self, indices: Tensor) -> Tensor:
        """Gathers rows on the host. With a GPU it waits until ``indices`` are on the host."""
        return self.table.index_select(0, indices.cpu()).to(self._device, non_blocking=True)


class Computed:
    """Rows computed at each request, with gradients if the features are trainable."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def rows(self, indices: Tensor) -> Tensor:
        """Runs the encoder over ``indices``."""
        with torch.set_grad_enabled(self._features.trainable and torch.is_grad_enabled()):
            return self._features.rows(indices)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval mode, and its parts back into their own: in train mode, a frozen one may be in eval."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, is_training in modes:
            part.training = is_training


def of_data(features: Features) -> Features:
    """Returns features of data for any device: rows are made on the CPU and copied to the indices' device."""

    def rows(indices: Tensor) -> Tensor:
        return features.rows(indices.cpu()).to(indices.device, non_blocking=True)

    return replace(features, rows=rows)


def hold(features: Features, mode: FeatureModeName, device: torch.device, *, blank: bool = False) -> FeatureSource:
    """Returns the source of rows for a mode. ``cache`` and ``cache_host`` compute all rows now, in their dtype.

    Data that rows are cut from are held on the device or not at all. In ``cache_host`` the data set holds them and
    sends the rows with each batch (``for_features``).

    Args:
        blank: the table has rows of zeros but for the first, since computing all may take minutes.

    Raises:
        ValueError: a table of trainable features was requested, which would never change.
    """
    if mode == "dynamic" or (mode == "cache_host" and features.store is not None):
        return Computed(features)
    if features.trainable:
        raise ValueError(f"memory.features={mode} would freeze features that are trained; only dynamic can train them.")
    home = device if mode == "cache" else torch.device("cpu")
    table = _filled(features, device, home, blank=blank) if features.store is None else features.store().to(home)
    return DeviceTable(table, features.cut) if mode == "cache" else HostTable(table, device)


def _filled(features: Features, device: torch.device, home: torch.device, *, blank: bool) -> Tensor:
    """Returns a table on ``home``, ``[num_rows, dim]``, whose rows are computed on ``device``."""
    num_computed = 1 if blank else features.num_rows
    with torch.no_grad():
        for start in range(0, max(num_computed, 1), CHUNK_ROWS):
            indices = torch.arange(start, min(start + CHUNK_ROWS, num_computed), device=device)
            chunk = features.rows(indices)
            if start == 0:
                table = chunk.new_zeros((features.num_rows, *chunk.shape[1:]), device=home)
            table[start : start + len(indices)] = chunk
    return table


class FeatureTable:
    """Feature rows, made once the model is on its device and has its weights.

    States: not held, then a mode, then only slower modes.
    """

    def __init__(self, features: Features, mode: FeatureModeName, *, may_change: bool) -> None:
        """``may_change``: take a slower mode if the table does not fit."""
        self._features, self.mode, self._may_change = features, mode, may_change
        self.source: FeatureSource | None = None
        """None until the table is held."""

    def hold(self, model: nn.Module, device: torch.device, on_event: OnEvent) -> None:
        """Fills the table, unless that is done."""
        slower = dict(pairwise(FEATURE_MODES)) if self._may_change else {}
        with in_eval_mode(model):
            while self.source is None and self.mode in slower:
                self.source, failure = oom.attempt(hold, self._features, self.mode, device)
                if failure is not None:
                    on_event("oom", message=failure.message)
                    oom.release()
                    self.mode = slower[self.mode]
                    on_event("ladder", change=f"memory.features={self.mode}")
            self.source = self.source or hold(self._features, self.mode, device)

    def move_to(self, mode: FeatureModeName, device: torch.device) -> bool:
        """Changes to a slower mode; returns False if that mode or a slower one is in use.

        Computes nothing and allocates no device memory.
        """
        if FEATURE_MODES.index(mode) <= FEATURE_MODES.index(self.mode):
            return False
        held, self.mode, self.source = self.source, mode, Computed(self._features)
        if mode == "cache_host" and isinstance(held, DeviceTable) and self._features.store is None:
            self.source = HostTable(held.table.cpu(), device)
        return True
