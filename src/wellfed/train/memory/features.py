"""Provides a workload's feature rows: from a table on the device or in host memory, or computed each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from wellfed.contract import FEATURE_MODES, FeatureModeName, Features, FeatureSource

CHUNK_ROWS = 256
"""Rows computed at a time while a table is filled: a GPT-2 base over 64 tokens needs about 0.3 GiB for them."""


def _select(table: Tensor, indices: Tensor) -> Tensor:
    return table.index_select(0, indices)


class DeviceTable:
    """All rows on the training device, or what they are cut from."""

    def __init__(self, table: Tensor, cut: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        self.table, self._cut = table, cut or _select

    def rows(self, indices: Tensor) -> Tensor:
        """A gather on the device."""
        return self._cut(self.table, indices)


class HostTable:
    """All rows in host memory, page-locked where a GPU is there; each request is gathered there and copied."""

    def __init__(self, table: Tensor, device: torch.device) -> None:
        self._device = device
        self.table = table.pin_memory() if device.type == "cuda" else table

    def rows(self, indices: Tensor) -> Tensor:
        """Gathered on the host. On a GPU this waits for ``indices`` to arrive there first."""
        return self.table.index_select(0, indices.cpu()).to(self._device, non_blocking=True)


class Computed:
    """Rows computed at each request; gradients flow where the features are trainable."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def rows(self, indices: Tensor) -> Tensor:
        """One forward pass of the encoder over ``indices``."""
        if self._features.trainable:
            return self._features.rows(indices)
        with torch.no_grad():
            return self._features.rows(indices)


def weights_behind(features: Features, model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters of a model that its feature rows are computed by: those that a gradient of a row reaches.

    Computes one row on the device of the model, which stays as it is.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    was_training = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            row = features.rows(torch.zeros(1, dtype=torch.long, device=trained[0].device if trained else None))
            if not (trained and row.requires_grad):
                return []
            found = torch.autograd.grad(row.sum(), trained, allow_unused=True)
    finally:
        for part, mode in was_training:
            part.training = mode
    return [weight for weight, gradient in zip(trained, found, strict=True) if gradient is not None]


def of_data(features: Features) -> Features:
    """Those that data offer, for any device: their rows are made on the CPU and copied to where they are asked for."""

    def rows(indices: Tensor) -> Tensor:
        return features.rows(indices.cpu()).to(indices.device, non_blocking=True)

    return replace(features, rows=rows)


def all_rows(features: Features, device: torch.device, home: torch.device) -> Tensor:
    """All rows, computed on ``device`` and kept on ``home``: ``[num_rows, dim]`` in the dtype of ``rows``.

    Of rows that overlap it is what they are cut from.

    Raises:
        ValueError: there are none.
    """
    if features.store is not None:
        return features.store().to(home)
    table: Tensor | None = None
    with torch.no_grad():
        for start in range(0, features.num_rows, CHUNK_ROWS):
            indices = torch.arange(start, min(start + CHUNK_ROWS, features.num_rows), device=device)
            chunk = features.rows(indices)
            if table is None:
                table = torch.empty((features.num_rows, *chunk.shape[1:]), dtype=chunk.dtype, device=home)
            table[start : start + len(indices)] = chunk
    if table is None:
        raise ValueError("A workload offers features of 0 rows.")
    return table


def _is_held(features: Features, mode: FeatureModeName) -> bool:
    """Whether there is a table in this mode; of what rows are cut from only on the device."""
    return mode == "cache" or (mode == "cache_host" and features.store is None)


def hold(features: Features, mode: FeatureModeName, device: torch.device, known: Tensor | None = None) -> FeatureSource:
    """The source of rows for a mode. ``cache`` and ``cache_host`` compute all rows now, in the dtype of ``rows``.

    What rows are cut from is held on the device or not at all: in ``cache_host`` the data hold it themselves and send
    the rows with each batch (``for_features``).

    Args:
        known: what `all_rows` gave earlier, on the table's home; computed now where it is None.

    Raises:
        ValueError: trainable features asked to be kept: they would never change.
    """
    if not _is_held(features, mode):
        return Computed(features)
    if features.trainable:
        raise ValueError(f"memory.features={mode} would freeze features that are trained; only dynamic can train them.")
    if known is None:
        known = all_rows(features, device, device if mode == "cache" else torch.device("cpu"))
    return DeviceTable(known, features.cut) if mode == "cache" else HostTable(known, device)


def slower(mode: FeatureModeName) -> FeatureModeName | None:
    """The mode that needs the next less device memory."""
    return dict(pairwise(FEATURE_MODES)).get(mode)


def moved(source: FeatureSource, features: Features, mode: FeatureModeName, device: torch.device) -> FeatureSource:
    """The same rows by a slower mode; nothing is computed anew and nothing more is asked of the device."""
    if mode == "cache_host" and isinstance(source, DeviceTable) and features.store is None:
        return HostTable(source.table.cpu(), device)
    return Computed(features)


def blank(features: Features, mode: FeatureModeName, device: torch.device) -> FeatureSource:
    """As `hold`, of the same size and without the work: all rows are zeros."""
    if not _is_held(features, mode):
        return Computed(features)
    if features.store is not None:
        return hold(features, mode, device, torch.zeros_like(features.store(), device=device))
    with torch.no_grad():
        row = features.rows(torch.zeros(1, dtype=torch.long, device=device))
    home = device if mode == "cache" else torch.device("cpu")
    table = torch.zeros((features.num_rows, *row.shape[1:]), dtype=row.dtype, device=home)
    return hold(features, mode, device, table)
