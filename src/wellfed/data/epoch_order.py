"""Assigns samples to optimizer steps, as a function of seed, epoch, batch and rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wellfed.data.sampled_epochs import SampledEpochs
from wellfed.errors import DataError
from wellfed.ranks import share_of
from wellfed.sample_rng import seed_from


class Share(NamedTuple):
    """One rank's share of the samples of an optimizer step."""

    batch: int
    indices: Tensor
    """Dataset indices, long ``[n]``, n >= 1."""
    total: int
    """Samples of the step over all ranks."""
    is_padding: bool
    """Whether this rank has no sample of a step with fewer samples than ranks. One index gives the shapes; its loss
    must not count."""


class Taken(NamedTuple):
    """The batches of an epoch that an earlier run with other loader.skip_ids trained on."""

    skip_ids: tuple[int, ...]
    num_batches: int


class EpochOrder:
    """The order of the samples in each epoch, cut into steps over ``world_size`` ranks.

    Every rank computes the whole order (8 bytes per sample) and takes its share of each step. Shares are disjoint and
    complete for any number of ranks. Workers get the indices with each request.

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
        self._cached: tuple[int, list[Tensor]] | None = None
        """An epoch and its steps, if a batch sampler lists them; else its whole order."""
        self._rest: tuple[int, int, Tensor] | None = None
        """A resumed epoch, the number of its first batch, and its remaining indices."""
        if self._has_lists:
            lists = self._kept(0)
            self.num_batches = len(lists) if limit_batches is None else min(len(lists), limit_batches)
            self.num_kept = sum(map(len, lists[: self.num_batches]))
        else:
            self.num_kept = num_samples - len(self.skip_ids) if sampled is None else len(self._kept_of(0))
            self.num_batches = self._num_steps(self.num_kept)

    def order(self, epoch: int) -> Tensor:
        """Returns the dataset indices of an epoch in the order of training, long ``[kept samples]``."""
        return self._kept(epoch)[0]

    def go_on(self, epoch: int, taken: Sequence[Taken]) -> int:
        """Makes the remaining samples of an epoch its last batches, and returns the number of the first of them.

        After a change of loader.skip_ids, batches of the same number would hold other samples. The remaining samples
        are neither trained on nor skipped now. The lists of a batch sampler keep their numbers.
        """
        if self._has_lists:
            return sum(part.num_batches for part in taken)
        if not taken:
            self._rest = None
            return 0
        rest = self._whole(epoch)
        for skip_ids, num_batches in taken:
            taken_at = _is_kept(rest, skip_ids).nonzero().flatten()[: num_batches * self._batch_size]
            is_left = torch.ones(len(rest), dtype=torch.bool)
            is_left[taken_at] = False  # by position, since a sampler may repeat an index
            rest = rest[is_left]
        rest = _without(rest, self.skip_ids)
        num_left = self._num_steps(len(rest), sum(part.num_batches for part in taken))
        self._rest = epoch, self.num_batches - num_left, rest
        return self.num_batches - num_left

    def share(self, epoch: int, batch: int) -> Share:
        """Returns this rank's share of one step."""
        return next(self.shares(epoch, (batch,)))

    def shares(self, epoch: int, numbers: Iterable[int]) -> Iterator[Share]:
        """Yields this rank's share of each of these steps; the shares are contiguous and nearly equal."""
        kept, first, size, start = self._kept(epoch), 0, self._batch_size, 0
        if self._rest is not None and self._rest[0] == epoch:
            _, first, rest = self._rest
            kept = [rest]
        order = kept[0]
        num_kept = order.numel()
        for batch in numbers:
            if self._has_lists:
                order = kept[batch]
                total = order.numel()
            else:
                start = (batch - first) * size
                total = min(size, num_kept - start)
            own = share_of(total, self._rank, self._world_size)
            # narrow takes half the time of a slice
            indices = order.narrow(0, start + own.start, len(own)) if own else order.narrow(0, start, 1)
            yield Share(batch, indices, total, not own)

    def _kept(self, epoch: int) -> list[Tensor]:
        """Returns the steps of an epoch from a batch sampler, or the whole order, without skipped samples."""
        key = epoch if self._shuffle else 0
        if self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        if self.sampled is not None and self._has_lists:
            kept = [_without(indices, self.skip_ids) for indices in self.sampled.batches(key)]
            if not all(map(len, kept)):
                raise DataError(
                    f"loader.skip_ids leaves nothing of a batch that {self.sampled.name} gives. "
                    "Leave those samples out of the sampler, or set loader.skip_ids=[]."
                )
        else:
            order = self._kept_of(key)
            if len(order) < self.num_kept:  # the sampler chose more skipped samples than in the first epoch
                order = torch.cat([order, order[: self.num_kept - len(order)]])
            kept = [order[: self.num_kept]]
        self._cached = key, kept
        return kept

    def _num_steps(self, num_samples: int, num_taken: int = 0) -> int:
        """Returns the number of steps for ``num_samples``, after ``num_taken`` steps of the epoch."""
        whole, left = divmod(num_samples, self._batch_size)
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


def _without(order: Tensor, indices: Sequence[int]) -> Tensor:
    return order[_is_kept(order, indices)] if indices else order


def _is_kept(order: Tensor, left_out: Sequence[int]) -> Tensor:
    return ~torch.isin(order, torch.tensor(left_out, dtype=torch.int64))
