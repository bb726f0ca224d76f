"""Assigns samples to optimizer steps, as a function of seed, epoch, batch and rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wellfed.data.sampled_epochs import SampledEpochs, index_type
from wellfed.errors import DataError
from wellfed.ranks import share_of
from wellfed.sample_rng import Bits, random_bits, seed_from

LISTED = 2**24
"""Maximum number of samples whose order is listed, in 4 bytes a sample; the order of more samples is computed."""
_WINDOW = 2**13
"""Places of a computed order that are computed at a time."""
_ROUNDS = 4


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


class Taken(NamedTuple):
    """The batches of an epoch that an earlier run with other loader.skip_ids trained on."""

    skip_ids: tuple[int, ...]
    num_batches: int


class ComputedOrder:
    """A random order of ``num`` samples that is computed where it is read, so that its length costs no memory.

    A Feistel cipher permutes the numbers below a power of two. Results that are no sample are permuted again until they
    are, so each sample comes once.

    Args:
        seed: None = ascending.
    """

    def __init__(self, num: int, seed: int | None) -> None:
        self._num, self._type = num, index_type(num)
        self._seeds = () if seed is None else tuple(seed_from(seed, number) for number in range(_ROUNDS))
        bits = (num - 1).bit_length()
        self._low_bits = np.uint64(bits // 2)
        self._masks = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
        self._window = 0, torch.empty(0, dtype=self._type)
        """Place of the first of the indices computed last, and these."""

    def numel(self) -> int:
        """Returns the number of samples, like `Tensor.numel`."""
        return self._num

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Returns the indices at ``length`` places from ``start`` on, like `Tensor.narrow`."""
        first, window = self._window
        if not first <= start <= first + len(window) - length:
            first, window = start, self._computed(start, min(max(length, _WINDOW), self._num - start))
            self._window = first, window
        return window.narrow(dim, start - first, length)

    def listed(self) -> Tensor:
        """Returns all indices."""
        starts = range(0, self._num, _WINDOW)
        return torch.cat([self._computed(start, min(_WINDOW, self._num - start)) for start in starts])

    def _computed(self, start: int, length: int) -> Tensor:
        found = self._permuted(np.arange(start, start + length, dtype=np.uint64))
        while len(beyond := np.flatnonzero(found >= np.uint64(self._num))):
            found[beyond] = self._permuted(found[beyond])
        return torch.from_numpy(found.view(np.int64)).to(self._type)

    def _permuted(self, places: Bits) -> Bits:
        low, high = places & self._masks[0], places >> self._low_bits
        for number, seed in enumerate(self._seeds):
            if number % 2:
                low ^= random_bits(high, seed) & self._masks[0]
            else:
                high ^= random_bits(low, seed) & self._masks[1]
        return high << self._low_bits | low


Order = Tensor | ComputedOrder


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
        self._is_large = sampled is None and num_samples > LISTED
        self._listed_epoch: int | None = None
        """Epoch of a large set whose order is listed."""
        self._cached: tuple[int, Sequence[Order]] | None = None
        """An epoch and its steps, if a batch sampler lists them; else its whole order."""
        self._rest: tuple[int, int, Tensor] | None = None
        """A resumed epoch, the number of its first batch, and its remaining indices."""
        if self._has_lists:
            lists = self._kept(0)
            self.num_batches = len(lists) if limit_batches is None else min(len(lists), limit_batches)
            self.num_kept = sum(each.numel() for each in lists[: self.num_batches])
        else:
            self.num_kept = num_samples - len(self.skip_ids) if sampled is None else self._kept_of(0).numel()
            self.num_batches = self._num_steps(self.num_kept)

    def order(self, epoch: int) -> Tensor:
        """Returns the dataset indices of an epoch in the order of training, int32 or int64 ``[kept samples]``."""
        return _listed(self._kept(epoch)[0])

    def is_computed(self, epoch: int) -> bool:
        """Returns whether the order of an epoch is computed where it is read."""
        return self._is_large and epoch != self._listed_epoch

    def list_epoch(self, epoch: int | None) -> None:
        """Lists the order of an epoch of any length, as versions did that computed none; None = of no epoch."""
        if self._is_large and epoch != self._listed_epoch:
            self._listed_epoch, self._cached = epoch, None

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
        rest = _listed(self._whole(epoch))
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
        known, own, offset, count = -1, range(0), 0, 1
        for batch in numbers:
            if self._has_lists:
                order = kept[batch]
                total = order.numel()
            else:
                start = (batch - first) * size
                total = min(size, num_kept - start)
            if total != known:  # mostly once an epoch
                known, own = total, share_of(total, self._rank, self._world_size)
                offset, count = (own.start, len(own)) if own else (0, 1)
            # narrow takes half the time of a slice
            yield Share(batch, order.narrow(0, start + offset, count), total, not own)

    def _kept(self, epoch: int) -> Sequence[Order]:
        """Returns the steps of an epoch from a batch sampler, or the whole order, without skipped samples."""
        key = epoch if self._shuffle else 0
        if self._cached is not None and self._cached[0] == key:
            return self._cached[1]
        kept: Sequence[Order]
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
            if isinstance(order, Tensor) and len(order) != self.num_kept:
                # The sampler chose more, or fewer, skipped samples than in the first epoch.
                order = torch.cat([order, order[: max(0, self.num_kept - len(order))]])[: self.num_kept]
            kept = [order]
        self._cached = key, kept
        return kept

    def _num_steps(self, num_samples: int, num_taken: int = 0) -> int:
        """Returns the number of steps for ``num_samples``, after ``num_taken`` steps of the epoch."""
        whole, left = divmod(num_samples, self._batch_size)
        number = whole if self._drop_last or not left else whole + 1
        return number if self._limit is None else min(number, max(0, self._limit - num_taken))

    def _kept_of(self, epoch: int) -> Order:
        order = self._whole(epoch)
        return _without(_listed(order), self.skip_ids) if self.skip_ids else order

    def _whole(self, epoch: int) -> Order:
        if self.sampled is not None:
            return self.sampled.indices(epoch)
        seed = seed_from(self._seed, epoch)
        if self.is_computed(epoch):
            return ComputedOrder(self._num_samples, seed if self._shuffle else None)
        kind = index_type(self._num_samples)
        if not self._shuffle:
            return torch.arange(self._num_samples, dtype=kind)
        return torch.randperm(self._num_samples, dtype=kind, generator=torch.Generator().manual_seed(seed))


def _listed(order: Order) -> Tensor:
    return order if isinstance(order, Tensor) else order.listed()


def _without(order: Tensor, indices: Sequence[int]) -> Tensor:
    return order[_is_kept(order, indices)] if indices else order


def _is_kept(order: Tensor, left_out: Sequence[int]) -> Tensor:
    return ~torch.isin(order, torch.tensor(left_out, dtype=order.dtype))
