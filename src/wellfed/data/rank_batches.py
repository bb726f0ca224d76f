"""Shares out the batches of a user's loader to several ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from wellfed.errors import ConfigError
from wellfed.ranks import share_of


class RankBatches:
    """Gives a rank its share of each batch of a batch sampler. Rank 0 draws the order of an epoch for all ranks."""

    def __init__(self, inner: Iterable[Any], rank: int, world_size: int) -> None:
        self.inner, self._rank, self._world_size = inner, rank, world_size
        self._totals: list[int] = []

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        box: list[Any] = [list(map(list, self.inner)) if self._rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=_group_of_hosts(dist.group.WORLD))
        self._totals = [len(batch) for batch in box[0]]
        for batch in box[0]:
            own = share_of(len(batch), self._rank, self._world_size)
            yield batch[own.start : own.stop] if own else batch[:1]

    def total_of(self, index: int) -> tuple[int, bool]:
        """Returns the samples of a step over all ranks, and whether this rank has none of them but padding."""
        total = self._totals[index]
        return total, not share_of(total, self._rank, self._world_size)


def is_read_by_each(loader: Any) -> bool:
    """Returns whether each rank reads a loader of its own, since there are no indices to share out."""
    return not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)


def shared_out(loader: Any, rank: int, world_size: int) -> Any:
    """Returns the DataLoader of one rank, which gives its share of each batch.

    Raises:
        ConfigError: the batches can't be shared out.
    """
    if world_size == 1 or is_read_by_each(loader):
        return loader
    samplers = loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)
    sharing = next((one for one in samplers if getattr(one, "num_replicas", 1) not in (None, 1)), None)
    if sharing is not None:
        problem = f"{type(sharing).__name__} gives one of {sharing.num_replicas} ranks its share"
        way_out = "Leave it out, or set num_replicas=1."
    elif loader.batch_sampler is None or type(loader).__iter__ is not DataLoader.__iter__:
        problem = "batches are made by " + (type(loader).__name__ if loader.batch_sampler else "its data set")
        way_out = "Hand over the dataset instead of its loader: Datasets(dataset, ...)."
    else:
        own = copy.copy(loader)
        vars(own).update(batch_sampler=RankBatches(loader.batch_sampler, rank, world_size), _iterator=None)
        return own
    problem = f"the train DataLoader's {problem}, and each step is shared out to {world_size} ranks here."
    raise ConfigError.of("workload.data", problem, way_out)


def agreed(num_samples: int, *, is_last: bool) -> tuple[int, bool]:
    """Returns the samples of a step over all ranks, and whether it is the last batch of one of them."""
    sums = torch.tensor([num_samples, int(is_last)])
    dist.all_reduce(sums, group=_group_of_hosts(dist.group.WORLD))
    total, num_ending = sums.tolist()
    return total, num_ending > 0


@cache
def _group_of_hosts(world: Any) -> Any:
    """Returns a group of all ranks that exchanges on the host, by gloo."""
    return world if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")
