"""Assigns samples to optimizer steps, as a function of seed, epoch, batch and rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellfed.data.sampled_epochs import SampledEpochs, index_type
from wellfed.errors import DataError
from wellfed.ranks import share_of
from wellfed.sample_rng import seed_from


class Share(NamedTuple):
    """One rank's share of the samples of an optimizer step."""

    batch: int
    indices: Tensor
    """Dataset indices, int32 or int64 ``[n]``, n >= 1."""
    total: int
    """Samples of the step over all ranks."""
    is_padding: bool
    """Whether this rank has no sample of a step with fewer samples than ranks. One index gives the shapes; its loss
    must not count."""


class EpochOrder:
    """The order of the samples in each epoch, cut into steps over ``world_size`` ranks.

    Every rank has the whole order and takes its share of each step. Shares are disjoint and complete for any number of
    ranks. Workers get the indices with each request.

    Args:
        batch_size: samples per step; unused for a batch sampler, which lists the steps.
        sampled: selects the samples of each epoch, in its order; None = all samples, shuffled if ``shuffle``.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int | None,
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
        self.sampled, self._batch_size = sampled, batch_size or 1
        self._seed, self._rank, self._world_size, self._shuffle = seed, rank, world_size, shuffle
        self._num_samples, self._drop_last, self._limit = num_samples, drop_last, limit_batches
        self._has_lists = sampled is not None and sampled.in_batches
        self.skip_ids = tuple(sorted({index for index in skip_ids if 0 <= index < num_samples}))
        self._cached: tuple[int, Sequence[Tensor]] | None = None
        """An epoch and its steps, if a batch sampler lists them; else its whole order."""
        if self._has_lists:
            lists = self._kept(0)
            self.num_batches = len(lists) if limit_batches is None else min(len(lists), limit_batches)
            self.num_kept = sum(each.numel() for each in lists[: self.num_batches])
        else:
            self.num_kept = num_samples - len(self.skip_ids) if sampled is None else self._kept_of(0).numel()
            self.num_batches = self._num_steps(self.num_kept)

    def check_length(self, dataset: Any) -> None:
        """Raises a DataError if the dataset has another number of samples than at the start of training."""
        if (now := len(dataset)) != self._num_samples:
            raise DataError(
                f"{type(dataset).__name__} has {now} samples, and had {self._num_samples} when training began. The "
                "steps of an epoch are planned from that number: keep it, and let __getitem__ choose what a sample is."
            )

    def order(self, epoch: int) -> Tensor:
        """Returns the dataset indices of an epoch in the order of training, int32 or int64 ``[kept samples]``."""
        return self._kept(epoch)[0]

    def share(self, epoch: int, batch: int) -> Share:
        """Returns this rank's share of one step."""
        return next(self.shares(epoch, (batch,)))

    def shares(self, epoch: int, numbers: Iterable[int]) -> Iterator[Share]:
        """Yields this rank's share of each of these steps; the shares are contiguous and nearly equal."""
        kept, size, start = self._kept(epoch), self._batch_size, 0
        order = kept[0]
        num_kept = order.numel()
        known, own, offset, count = -1, range(0), 0, 1
        for batch in numbers:
            if self._has_lists:
                order = kept[batch]
                total = order.numel()
            else:
                start = batch * size
                total = min(size, num_kept - start)
            if total != known:  # mostly once an epoch
                known, own = total, share_of(total, self._rank, self._world_size)
                offset, count = (own.start, len(own)) if own else (0, 1)
            # narrow takes half the time of a slice
            yield Share(batch, order.narrow(0, start + offset, count), total, not own)

    def _kept(self, epoch: int) -> Sequence[Tensor]:
        """Returns the steps of an epoch from a batch sampler, or the whole order, without skipped samples."""
        key = epoch if self._shuffle else 0
        if self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        kept: Sequence[Tensor]
        if self.sampled is not None and self._has_lists:
            lists = [_without(indices, self.skip_ids) for indices in self.sampled.batches(key)]
            if not all(map(len, lists)):
                raise DataError(
                    f"loader.skip_ids leaves nothing of a batch that {self.sampled.name} gives. "
                    "Leave those samples out of the sampler, or set loader.skip_ids=[]."
                )
            kept = lists
        else:
            order = self._kept_of(key)
            if len(order) != self.num_kept:
                # The sampler chose more, or fewer, skipped samples than in the first epoch.
                order = torch.cat([order, order[: max(0, self.num_kept - len(order))]])[: self.num_kept]
            kept = [order]
        self._cached = key, kept
        return kept

    def _num_steps(self, num_samples: int) -> int:
        whole, left = divmod(num_samples, self._batch_size)
        number = whole if self._drop_last or not left else whole + 1
        return number if self._limit is None else min(number, self._limit)

    def _kept_of(self, epoch: int) -> Tensor:
        return _without(self._whole(epoch), self.skip_ids)

    def _whole(self, epoch: int) -> Tensor:
        if self.sampled is not None:
            return self.sampled.indices(epoch)
        kind = index_type(self._num_samples)
        if not self._shuffle:
            return torch.arange(self._num_samples, dtype=kind)
        generator = torch.Generator().manual_seed(seed_from(self._seed, epoch))
        return torch.randperm(self._num_samples, dtype=kind, generator=generator)


def _without(order: Tensor, indices: Sequence[int]) -> Tensor:
    return order[~torch.isin(order, torch.tensor(indices, dtype=order.dtype))] if indices else order
