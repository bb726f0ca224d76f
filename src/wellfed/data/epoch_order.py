"""Assigns samples to optimizer steps, as a function of seed, epoch, batch and rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wellfed.data.backends.batch_request import BatchRequest
from wellfed.errors import DataError
from wellfed.ranks import share_of
from wellfed.sample_rng import seed_from


class EpochOrder:
    """The order of the samples in each epoch, cut into steps over ``world_size`` ranks.

    Every rank has the whole order and takes its share of each step. Shares are disjoint and complete for any number of
    ranks. Workers get the indices with each request.

    Args:
        batch_size: samples per step.
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
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._rank, self._world_size = rank, world_size
        self._num_samples = num_samples
        self.skip_ids = tuple(sorted({index for index in skip_ids if 0 <= index < num_samples}))
        self.num_kept = num_samples - len(self.skip_ids)
        whole, left = divmod(self.num_kept, batch_size)
        num_steps = whole if drop_last or not left else whole + 1
        self.num_batches = num_steps if limit_batches is None else min(num_steps, limit_batches)
        self._cached: tuple[int, Tensor] | None = None
        """An epoch and its order."""

    def check_length(self, dataset: Any) -> None:
        """Raises a DataError if the dataset has another number of samples than at the start of the run."""
        if (now := len(dataset)) != self._num_samples:
            raise DataError(
                f"{type(dataset).__name__} has {now} samples, and had {self._num_samples} when the run began. The "
                "batches of an epoch are planned from that number: keep it, and let __getitem__ choose a sample."
            )

    def order(self, epoch: int) -> Tensor:
        """Returns the dataset indices of an epoch in the order of training, int32 or int64 ``[kept samples]``."""
        key = epoch if self._shuffle else 0
        if self._cached is None or self._cached[0] != key:
            # Half the memory of int64 is enough for most.
            kind = torch.int32 if self._num_samples <= torch.iinfo(torch.int32).max else torch.int64
            generator = torch.Generator().manual_seed(seed_from(self._seed, epoch))
            order = (
                torch.randperm(self._num_samples, dtype=kind, generator=generator)
                if self._shuffle
                else torch.arange(self._num_samples, dtype=kind)
            )
            if self.skip_ids:
                order = order[~torch.isin(order, torch.tensor(self.skip_ids, dtype=order.dtype))]
            self._cached = key, order
        return self._cached[1]

    def share(self, epoch: int, batch: int) -> BatchRequest:
        """Returns the request of this rank's share of one step."""
        return next(self.shares(epoch, (batch,)))

    def shares(self, epoch: int, numbers: Iterable[int]) -> Iterator[BatchRequest]:
        """Yields the request of this rank's share of each of these steps; the shares of ranks are nearly equal."""
        order, size = self.order(epoch), self._batch_size
        known, own, offset, count = -1, range(0), 0, 1
        for batch in numbers:
            start = batch * size
            total = min(size, self.num_kept - start)
            if total != known:  # mostly once an epoch
                known, own = total, share_of(total, self._rank, self._world_size)
                offset, count = (own.start, len(own)) if own else (0, 1)
            # narrow takes half the time of a slice
            yield BatchRequest(epoch, batch, order.narrow(0, start + offset, count), total, not own)
