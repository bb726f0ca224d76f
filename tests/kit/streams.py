"""Datasets that are read in order, with every way of sharing and resuming that a user's may have."""

import random
import time

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from wellfed.data.settings import LoaderSettings
from wellfed.data.train_loader import train_loader

SIZE = 23


def loader_of(dataset, settings=None, *, batch_size=4, seed=1, **more):
    return train_loader(dataset, settings or LoaderSettings(), batch_size=batch_size, seed=seed, **more)


class Plain(IterableDataset):
    """A stream of samples in order that can't be shared."""

    def __iter__(self):
        return (torch.tensor(number) for number in range(SIZE))


class Sharded(Plain):
    """A stream with ``shard``."""

    def __init__(self, numbers=range(SIZE)):
        self.numbers = list(numbers)

    def shard(self, index, count):
        return Sharded(self.numbers[index::count])

    def __iter__(self):
        return (torch.tensor(number) for number in self.numbers)


class Waiting(Sharded):
    """A stream that waits 2 ms for a sample, without CPU."""

    def shard(self, index, count):
        return Waiting(self.numbers[index::count])

    def __iter__(self):
        for number in super().__iter__():
            time.sleep(0.002)
            yield number


class InShards(Sharded):
    """A stream with ``num_shards``."""

    num_shards = 3


class ByWorker(Plain):
    """A stream that asks for torch's worker info, as in torch's documentation."""

    def __iter__(self):
        told = get_worker_info()
        first, step = (0, 1) if told is None else (told.id, told.num_workers)
        return (torch.tensor(number) for number in range(first, SIZE, step))


class ByNumber(Plain):
    """A stream that asks for the number of the worker only."""

    def __iter__(self):
        told = get_worker_info()
        return (torch.tensor(number) for number in range(0 if told is None else told.id, SIZE, 2))


class Stateful(IterableDataset):
    """A stream that saves its position, which it holds itself, and has a new order in each epoch."""

    def __init__(self, numbers=range(SIZE)):
        self.numbers, self.epoch, self.place = list(numbers), 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def shard(self, index, count):
        return type(self)(self.numbers[index::count])

    def __iter__(self):
        numbers = random.Random(self.epoch).sample(self.numbers, len(self.numbers))
        while self.place < len(numbers):
            self.place += 1
            yield torch.tensor(numbers[self.place - 1])
        self.place = 0

    def state_dict(self):
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.place, self.epoch = state["place"], state["epoch"]


class Drawing(Sharded):
    """A stream that shuffles by Python's generator and adds noise of all three generators to each sample."""

    def shard(self, index, count):
        return Drawn(self.numbers, index, count)

    def __iter__(self):
        return iter(Drawn(self.numbers, 0, 1))


class Drawn(IterableDataset):
    def __init__(self, numbers, index, count):
        self.numbers, self.index, self.count = numbers, index, count

    def __iter__(self):
        numbers = random.sample(self.numbers, len(self.numbers))
        for number in numbers[self.index :: self.count]:
            noise = [random.random(), np.random.random(), float(torch.rand(()))]
            yield torch.tensor([number, *noise], dtype=torch.float64)


class Batches:
    """A stream of batches with a length."""

    def __init__(self, length, given=None):
        self.length, self.given = length, length if given is None else given

    def __len__(self):
        return self.length

    def __iter__(self):
        return (torch.full((2,), number) for number in range(self.given))
