"""Decides which samples belong to which optimizer step: functions of seed, epoch, batch and rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wellfed.sample_rng import mix


class Share(NamedTuple):
    """The part of one optimizer step's samples that one rank takes."""

    batch: int
    indices: Tensor
    """Long ``[n]``, n >= 1, dataset indices."""
    total: int
    """Samples of the step over all ranks."""
    is_padding: bool
    """The step has fewer samples than ranks and this rank got none: one index is there for the shapes, its loss
    must count nothing."""


class Taken(NamedTuple):
    """A part of an epoch that an earlier run has trained on, which left out other samples than this one does."""

    skip_ids: tuple[int, ...]
    num_batches: int


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
        self._num_samples, self._drop_last, self._limit = num_samples, drop_last, limit_batches
        self.skip_ids = tuple(sorted({index for index in skip_ids if 0 <= index < num_samples}))
        self.num_kept = num_samples - len(self.skip_ids)
        self.num_batches = self._num_steps(self.num_kept)
        self._cached: tuple[int, Tensor] | None = None
        self._rest: tuple[int, int, Tensor] | None = None
        """An epoch that is gone on with, the number of its first batch, and what is left of it."""

    def order(self, epoch: int) -> Tensor:
        """Long ``[kept samples]``: the dataset indices of an epoch in the order of training."""
        key = epoch if self._shuffle else 0
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, _without(self._whole(key), self.skip_ids))
        return self._cached[1]

    def go_on(self, epoch: int, taken: Sequence[Taken]) -> int:
        """Let what is left of an epoch be its last batches; the number of the first of them.

        With other samples left out, a batch of the same number would begin elsewhere in the order: here those come that
        were not taken and are not left out now.
        """
        if not taken:
            self._rest = None
            return 0
        rest = self._whole(epoch)
        for skip_ids, num_batches in taken:
            rest = _without(rest, _without(rest, skip_ids)[: num_batches * self.batch_size])
        rest = _without(rest, self.skip_ids)
        num_left = self._num_steps(len(rest), sum(part.num_batches for part in taken))
        self._rest = epoch, self.num_batches - num_left, rest
        return self.num_batches - num_left

    def share(self, epoch: int, batch: int) -> Share:
        """This rank's part of one step: the samples are dealt in contiguous, nearly equal parts."""
        if self._rest is not None and self._rest[0] == epoch:
            _, first, order = self._rest
        else:
            first, order = 0, self.order(epoch)
        start = (batch - first) * self.batch_size
        total = min(self.batch_size, len(order) - start)
        low = start + total * self._rank // self._world_size
        size = start + total * (self._rank + 1) // self._world_size - low
        # narrow: half the time of a slice
        indices = order.narrow(0, low, size) if size else order.narrow(0, start, 1)
        return Share(batch, indices, total, size == 0)

    def _num_steps(self, num_samples: int, num_taken: int = 0) -> int:
        """Of so many samples, in an epoch of which so many steps have been taken."""
        whole, left = divmod(num_samples, self.batch_size)
        number = whole if self._drop_last or not left else whole + 1
        return number if self._limit is None else min(number, max(0, self._limit - num_taken))

    def _whole(self, epoch: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(self._num_samples)
        return torch.randperm(self._num_samples, generator=torch.Generator().manual_seed(mix(self._seed, epoch)))


def _without(order: Tensor, indices: Sequence[int] | Tensor) -> Tensor:
    return order[~torch.isin(order, torch.as_tensor(indices))] if len(indices) else order
