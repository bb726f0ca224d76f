"""DataLoaders and other iterables as people write them, by what is peculiar to each."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info
from torch.utils.data import WeightedRandomSampler as Weighted

SIZE = 22


class Rows(Dataset):
    """Row n holds n."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Drawing(Rows):
    """Adds noise of the process's generators to each row."""

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.random(), float(torch.rand(()))], dtype=torch.float64)


class Holding(Rows):
    """Adds noise of generators that it holds itself."""

    def __init__(self):
        self.rng, self.random = np.random.default_rng(7), random.Random(7)

    def __getitem__(self, index):
        return torch.tensor([index, self.rng.normal(), self.random.random()], dtype=torch.float64)


class Opened(Rows):
    """Reads from a file that only a worker opens."""

    handle = None

    def __getitem__(self, index):
        return torch.tensor([index, len(self.handle.read(1))])


def open_handle(number):
    get_worker_info().dataset.handle = Path(__file__).open()  # noqa: SIM115


class ByEpoch(Sampler):
    """An order by ``set_epoch``."""

    epoch = -1

    def __len__(self):
        return SIZE

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(SIZE).tolist())


class OwnOrder(Sampler):
    """Has a generator of its own, and another number of samples in each epoch."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __iter__(self):
        return iter(self.rng.permutation(SIZE)[: int(self.rng.integers(9, SIZE))].tolist())


class Lists(Sampler):
    """Batches of 6 and 2 in turn, in an order that torch draws."""

    def __iter__(self):
        order = torch.randperm(SIZE).tolist()
        for low in range(0, SIZE - 7, 8):
            yield order[low : low + 6]
            yield order[low + 6 : low + 8]


class Stream(IterableDataset):
    """Samples in order; workers and ranks share them."""

    def __init__(self, size=SIZE):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor([float(index)]) for index in range(first, self.size, step))


class Shuffled(Stream):
    """An order by ``set_epoch``."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.tensor(random.Random(self.epoch).sample(range(self.size), self.size)))


class Stateful(Stream):
    """Goes on from a place."""

    def __init__(self):
        self.size, self.place, self.read = SIZE, 0, 0

    def __iter__(self):
        while self.place < self.size:
            self.place, self.read = self.place + 1, self.read + 1
            yield torch.tensor([self.place - 1.0])
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Batches:
    """Yields batches, and more in each epoch."""

    epochs = 0

    def __iter__(self):
        self.epochs += 1
        return (torch.full((3, 1), float(number)) for number in range(2 + self.epochs))


class OwnIter(DataLoader):
    """Yields each batch twice."""

    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch)


def _own_generator():
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Rows(), 4),
    "shuffled": lambda: DataLoader(Rows(), 4, shuffle=True),
    "last left out": lambda: DataLoader(Rows(), 4, shuffle=True, drop_last=True),
    "a generator": lambda: DataLoader(Rows(), 4, shuffle=True, generator=_own_generator()),
    "a generator, last left out": lambda: DataLoader(
        Rows(), 4, shuffle=True, drop_last=True, generator=_own_generator()
    ),
    "a sampler": lambda: DataLoader(Rows(), 4, sampler=Weighted([1.0] * SIZE, 13)),
    "a sampler with set_epoch": lambda: DataLoader(Rows(), 4, sampler=ByEpoch()),
    "a sampler of epochs that differ": lambda: DataLoader(Rows(), 4, sampler=OwnOrder()),
    "a batch sampler": lambda: DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 4, True)),
    "lists": lambda: DataLoader(Rows(), batch_sampler=Lists()),
    "samples that draw": lambda: DataLoader(Drawing(), 4, shuffle=True),
    "samples that draw, of unknown number": lambda: DataLoader(Drawing(), 4, sampler=ByEpoch()),
    "workers that draw": lambda: DataLoader(Drawing(), 4, shuffle=True, num_workers=2),
    "held generators": lambda: DataLoader(Holding(), 4, shuffle=True),
    "worker_init_fn": lambda: DataLoader(Opened(), 4, shuffle=True, num_workers=2, worker_init_fn=open_handle),
    "workers that stay": lambda: DataLoader(Drawing(), 4, shuffle=True, num_workers=1, persistent_workers=True),
    "a collate_fn": lambda: DataLoader(Rows(), 4, collate_fn=lambda rows: torch.stack(rows) + 0.5),
    "no batch size": lambda: DataLoader(Rows(), None, sampler=ByEpoch()),
    "a stream": lambda: DataLoader(Stream(), 4),
    "a stream with workers": lambda: DataLoader(Stream(), 4, num_workers=2),
    "a stream with set_epoch": lambda: DataLoader(Shuffled(), 4),
    "a stream with a state": lambda: DataLoader(Stateful(), 4),
    "an iterable": Batches,
    "an __iter__ of its own": lambda: OwnIter(Rows(), 4, shuffle=True),
}
"""Makes a loader whose order is a function of the seed."""
