"""Datasets with every kind of randomness, failure and speed that a user's may have."""

import dataclasses
import os
import random
import signal
import time

import numpy as np
import torch

from wellfed.data.train_loader import train_loader

SIZE = 23


def loader_of(dataset, settings, *, skip_ids=(), max_skipped=0, batch_size=4, seed=1, **more):
    """Returns a train loader with these settings."""
    settings = dataclasses.replace(settings, skip_ids=tuple(skip_ids), max_skipped=max_skipped)
    return train_loader(dataset, settings, batch_size=batch_size, seed=seed, **more)


class Fetching:
    """A dataset with ``fetch`` and ``__getitem__(i, rng)`` that draws by ``rng.*_at``."""

    def __len__(self):
        return SIZE

    def fetch(self, indices, rng):
        return {"index": indices, "noise": rng.uniform_at(indices), "other": rng.randint_at(indices, 1000, draw=1)}

    def __getitem__(self, index, rng):
        one = torch.tensor([index])
        return {"index": index, "noise": rng.uniform_at(one)[0], "other": rng.randint_at(one, 1000, draw=1)[0]}


class Global:
    """A dataset with ``__getitem__`` only, which draws from the global generators."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


class Slow(Fetching):
    """A dataset whose first batches take longest, so that threads finish out of order."""

    def fetch(self, indices, rng):
        time.sleep(0.002 * (int(indices[0]) % 3))
        return super().fetch(indices, rng)


class Waiting(Fetching):
    """A dataset that waits 10 ms for a batch, without CPU."""

    def fetch(self, indices, rng):
        time.sleep(0.01)
        return super().fetch(indices, rng)


class Computing(Fetching):
    """A dataset that computes 10 ms for a batch."""

    def fetch(self, indices, rng):
        until_s = time.thread_time() + 0.01
        while time.thread_time() < until_s:
            pass
        return super().fetch(indices, rng)


class WaitingItems:
    """The same dataset, read sample by sample."""

    batch = Waiting

    def __len__(self):
        return SIZE

    def __getitem__(self, index, rng):
        return self.batch().fetch(torch.tensor([index]), rng)


class ComputingItems(WaitingItems):
    batch = Computing


class Writing(Fetching):
    """A dataset that overwrites the indices it gets."""

    def fetch(self, indices, rng):
        batch = super().fetch(indices.clone(), rng)
        indices.zero_()
        return batch


class Failing(Fetching):
    """A dataset that can't read one sample."""

    def __init__(self, bad, error=KeyError):
        self.bad, self.error = bad, error

    def fetch(self, indices, rng):
        if self.bad in indices:
            raise self.error("broken")
        return super().fetch(indices, rng)

    def __getitem__(self, index, rng):
        if index == self.bad:
            raise self.error("broken")
        return super().__getitem__(index, rng)


@dataclasses.dataclass
class Record:
    index: torch.Tensor


class Records(Fetching):
    def fetch(self, indices, rng):
        return Record(indices)


def collate_sum(samples):
    return torch.stack(samples).sum(dim=1)


class Breaking(Fetching):
    """A dataset that hangs, dies or raises at some samples."""

    def __init__(self, how, *bad):
        self.how, self.bad = how, bad

    def fetch(self, indices, rng):
        if any(index in self.bad for index in indices.tolist()):
            self.breaks()
        return super().fetch(indices, rng)

    def __getitem__(self, index, rng):
        if index in self.bad:
            self.breaks()
        return super().__getitem__(index, rng)

    def breaks(self):
        if self.how == "raise":
            raise OSError("truncated")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how.startswith("exit"):
            os._exit(int(self.how.removeprefix("exit ")))
        while True:
            time.sleep(0.01)


class BreakingItems(Breaking):
    """The same dataset with ``__getitem__`` only."""

    fetch = None


NOISE = np.random.default_rng(2)


def noise():
    """Draws from a generator of this module."""
    return NOISE.random()
