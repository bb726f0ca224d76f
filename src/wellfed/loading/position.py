"""Which samples belong to which optimizer step: order and shares as functions of (seed, epoch, batch, rank)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wellfed.sample_rng import mix


class Share(NamedTuple):
    """The part of one optimizer step's samples that one rank takes."""

    epoch: int
    batch: int
    indices: Tensor
    """Long ``[n]``, n >= 1, dataset indices."""
    total: int
    """Samples of the step over all ranks."""
    is_padding: bool
    """The step has fewer samples than ranks and this rank got none: one index is there for the shapes, its loss
    must count nothing."""


class EpochOrder:
    """The order of all epochs over ``num_samples`` samples, cut into steps of ``batch_size`` over ``world_size`` ranks.

    Every rank computes the whole order by itself (8 bytes a sample) and takes its share of each step, so the ranks'
    shares are disjoint and complete whatever their number is. It stays in the training process: who builds a batch is
    told its indices.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = True,
        skip_ids: Sequence[int] = (),
        limit_batches: int | None = None,
    ) -> None:
        self.batch_size = batch_size
        self._seed, self._rank, self._world_size, self._shuffle = seed, rank, world_size, shuffle
        self._num_samples, self._skip = num_samples, frozenset(i for i in skip_ids if 0 <= i < num_samples)
        kept = self.num_kept = num_samples - len(self._skip)
        num_batches = kept // batch_size if drop_last else -(-kept // batch_size)
        self.num_batches = num_batches if limit_batches is None else min(num_batches, limit_batches)
        self._cached: tuple[int, Tensor] | None = None

    def order(self, epoch: int) -> Tensor:
        """Long ``[kept samples]``: the dataset indices of an epoch in the order of training."""
        key = epoch if self._shuffle else 0
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._make_order(key))
        return self._cached[1]

    def share(self, epoch: int, batch: int) -> Share:
        """This rank's part of one step: the samples are dealt in contiguous, nearly equal parts."""
        order = self.order(epoch)
        start = batch * self.batch_size
        total = min(self.batch_size, self.num_kept - start)
        low = start + total * self._rank // self._world_size
        size = start + total * (self._rank + 1) // self._world_size - low
        # narrow: half the time of a slice
        indices = order.narrow(0, low, size) if size else order.narrow(0, start, 1)
        return Share(epoch, batch, indices, total, size == 0)

    def _make_order(self, epoch: int) -> Tensor:
        if self._shuffle:
            order = torch.randperm(self._num_samples, generator=torch.Generator().manual_seed(mix(self._seed, epoch)))
        else:
            order = torch.arange(self._num_samples)
        if self._skip:
            order = order[~torch.isin(order, torch.tensor(sorted(self._skip)))]
        return order
