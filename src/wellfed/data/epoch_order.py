"""Decides which samples belong to which optimizer step: functions of seed, epoch, batch and rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from wellfed.data.sampled_epochs import SampledEpochs
from wellfed.errors import DataError
from wellfed.ranks import share_of
from wellfed.sample_rng import seed_from


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
    told its indices. With ``sampled`` the samples of an epoch are those that a sampler gives, in its order, instead of
    all in a random one.
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
        sampled: SampledEpochs | None = None,
    ) -> None:
        self.batch_size, self.sampled = batch_size, sampled
        self._seed, self._rank, self._world_size, self._shuffle = seed, rank, world_size, shuffle
        self._num_samples, self._drop_last, self._limit = num_samples, drop_last, limit_batches
        self.skip_ids = tuple(sorted({index for index in skip_ids if 0 <= index < num_samples}))
        self._cached: tuple[int, Tensor] | None = None
        self.num_kept = num_samples - len(self.skip_ids) if sampled is None else len(self._kept_of(0))
        self.num_batches = self._num_steps(self.num_kept)
        self._rest: tuple[int, int, Tensor] | None = None
        """An epoch that is gone on with, the number of its first batch, and what is left of it."""

    def order(self, epoch: int) -> Tensor:
        """Long ``[kept samples]``: the dataset indices of an epoch in the order of training."""
        key = epoch if self._shuffle else 0
        if self._cached is None or self._cached[0] != key:
            order = self._kept_of(key)
            if len(order) < self.num_kept:  # a sampler chose more of what is left out than in the first epoch
                order = torch.cat([order, order[: self.num_kept - len(order)]])
            self._cached = (key, order[: self.num_kept])
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
            taken_at = _is_kept(rest, skip_ids).nonzero().flatten()[: num_batches * self.batch_size]
            is_left = torch.ones(len(rest), dtype=torch.bool)
            is_left[taken_at] = False  # by place: a sampler may give an index twice
            rest = rest[is_left]
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
        return _dealt(batch, order, start, total, self._rank, self._world_size)

    def _num_steps(self, num_samples: int, num_taken: int = 0) -> int:
        """Of so many samples, in an epoch of which so many steps have been taken."""
        whole, left = divmod(num_samples, self.batch_size)
        number = whole if self._drop_last or not left else whole + 1
        return number if self._limit is None else min(number, max(0, self._limit - num_taken))

    def _kept_of(self, epoch: int) -> Tensor:
        return _without(self._whole(epoch), self.skip_ids)

    def _whole(self, epoch: int) -> Tensor:
        if self.sampled is not None:
            return self.sampled.indices(epoch)
        if not self._shuffle:
            return torch.arange(self._num_samples)
        return torch.randperm(self._num_samples, generator=torch.Generator().manual_seed(seed_from(self._seed, epoch)))


class BatchOrder:
    """The steps of all epochs as a batch sampler lists them; a rank takes its share of each.

    An epoch has as many lists as the first one.
    """

    def __init__(
        self,
        sampled: SampledEpochs,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        skip_ids: Sequence[int] = (),
        limit_batches: int | None = None,
    ) -> None:
        """``shuffle``: ask for another order in each epoch."""
        self.sampled, self.skip_ids = sampled, tuple(sorted(set(skip_ids)))
        self._rank, self._world_size, self._shuffle = rank, world_size, shuffle
        self._cached: tuple[int, list[Tensor]] | None = None
        lists = self._lists(0)
        self.num_batches = len(lists) if limit_batches is None else min(len(lists), limit_batches)
        self.num_kept = sum(map(len, islice(lists, self.num_batches)))

    def go_on(self, epoch: int, taken: Sequence[Taken]) -> int:
        """The lists keep their numbers whatever is left out of them."""
        return sum(part.num_batches for part in taken)

    def share(self, epoch: int, batch: int) -> Share:
        """This rank's part of one list."""
        indices = self._lists(epoch)[batch]
        return _dealt(batch, indices, 0, len(indices), self._rank, self._world_size)

    def _lists(self, epoch: int) -> list[Tensor]:
        key = epoch if self._shuffle else 0
        if self._cached is None or self._cached[0] != key:
            kept = [_without(indices, self.skip_ids) for indices in self.sampled.batches(key)]
            if not all(map(len, kept)):
                raise DataError(
                    f"loader.skip_ids leaves nothing of a batch that {self.sampled.name} gives. "
                    "Leave those samples out of the sampler, or set loader.skip_ids=[]."
                )
            self._cached = key, kept
        return self._cached[1]


def _dealt(batch: int, order: Tensor, start: int, total: int, rank: int, world_size: int) -> Share:
    """A rank's part of the ``total`` samples of a step, which begins at ``start``."""
    own = share_of(total, rank, world_size)
    # narrow: half the time of a slice
    indices = order.narrow(0, start + own.start, len(own)) if own else order.narrow(0, start, 1)
    return Share(batch, indices, total, not own)


def _without(order: Tensor, indices: Sequence[int]) -> Tensor:
    return order[_is_kept(order, indices)] if indices else order


def _is_kept(order: Tensor, left_out: Sequence[int]) -> Tensor:
    return ~torch.isin(order, torch.tensor(left_out, dtype=torch.int64))
