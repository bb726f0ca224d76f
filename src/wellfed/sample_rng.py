"""Draws random numbers as functions of (seed, epoch, index), independent of the worker and the time.

`SampleRng` is a ``torch.Generator`` seeded for one batch. Its methods ``*_at`` depend on the sample's index only. Their
values are the same for every backend, number of workers and ranks, and after resume.
"""

from __future__ import annotations

import sys
import threading
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_ROUNDS = ((np.uint64(30), np.uint64(_MIX_1)), (np.uint64(27), np.uint64(_MIX_2)))
"""Shifts and factors of splitmix64 for numpy."""
Bits = NDArray[np.uint64]


def seed_from(*parts: int) -> int:
    """Returns a 63-bit seed made from integers; changing any of them gives an unrelated seed (splitmix64)."""
    return _mix_on(0, parts) >> 1


def _mix_on(state: int, parts: tuple[int, ...]) -> int:
    for part in parts:
        state = (state + _GOLDEN + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * _MIX_1) & _MASK
        state = ((state ^ (state >> 27)) * _MIX_2) & _MASK
        state ^= state >> 31
    return state


@lru_cache(maxsize=64)
def _states(seed: int, epoch: int, part: int) -> tuple[int, int]:
    """Returns the initial states of an epoch and of a part of its batches; cached, since each sample uses them."""
    state = _mix_on(0, (seed, epoch))
    return state, _mix_on(state, (part,))


def _signed(value: int) -> int:
    """Returns the int64 with the same 64 bits (two's complement), since torch multiplies int64."""
    return value - (1 << 64) if value >= 1 << 63 else value


def random_bits(numbers: Bits, seed: int) -> Bits:
    """Returns 63 random bits for each number, as a function of number and seed (splitmix64)."""
    state = numbers.copy()
    state *= np.uint64(_GOLDEN)
    state += np.uint64(seed)
    for bits, factor in _ROUNDS:
        state ^= state >> bits
        state *= factor
    state ^= state >> np.uint64(31)
    state >>= np.uint64(1)
    return state


def _bits_on_host(indices: Tensor, seed: int) -> Tensor:
    """Returns what `SampleRng.bits_at` does, by numpy: few numbers take a third of the time that torch takes."""
    numbers = indices.numpy().astype(np.int64, copy=False).view(np.uint64)
    return torch.from_numpy(random_bits(numbers, seed).view(np.int64))


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shifts right without the sign; torch's ``>>`` on int64 keeps the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


class SampleRng(torch.Generator):
    """A generator for one batch: sequential draws depend on the batch, ``*_at`` draws on the index only."""

    epoch_seed: int

    def __new__(
        cls, seed: int, epoch: int, batch: int = 0, part: int = 0, *, device: torch.device | str = "cpu"
    ) -> SampleRng:
        """Creates a generator on the device; ``part`` is the number of the rank or micro-batch."""
        if device == "cpu":  # the default, which takes less time unnamed
            return super().__new__(cls)
        return super().__new__(cls, device=device)  # type: ignore[call-arg]  # torch describes no __new__

    def __init__(
        self, seed: int, epoch: int, batch: int = 0, part: int = 0, *, device: torch.device | str = "cpu"
    ) -> None:
        self.begin(seed, epoch, batch, part)

    def begin(self, seed: int, epoch: int, batch: int, part: int) -> Self:
        """Returns this generator as a new one of another batch would be."""
        attributes = vars(self)
        attributes.clear()  # a data set may have kept something there
        of_epoch, of_part = _states(seed, epoch, part)
        attributes["epoch_seed"] = of_epoch >> 1
        self.manual_seed(_mix_on(of_part, (batch,)) >> 1)
        return self

    def bits_at(self, indices: Tensor, draw: int = 0) -> Tensor:
        """Returns 63 random bits for each index, int64 >= 0, with the shape and device of ``indices``."""
        seed = seed_from(self.epoch_seed, draw)
        if type(indices) is Tensor and indices.is_cpu:
            return _bits_on_host(indices, seed)
        state = indices.to(torch.int64) * _signed(_GOLDEN) + _signed(seed)
        state = (state ^ _shift(state, 30)) * _signed(_MIX_1)
        state = (state ^ _shift(state, 27)) * _signed(_MIX_2)
        return _shift(state ^ _shift(state, 31), 1)

    def randint_at(self, indices: Tensor, high: int | Tensor, draw: int = 0) -> Tensor:
        """Returns an integer in [0, high) for each index; ``high`` may differ by element.

        The modulo's bias is below high / 2**63.
        """
        return self.bits_at(indices, draw) % high

    def uniform_at(self, indices: Tensor, draw: int = 0) -> Tensor:
        """Returns a float32 in [0, 1) for each index."""
        return (self.bits_at(indices, draw) >> 39).to(torch.float32) * (1.0 / (1 << 24))


class _LatestGenerators(threading.local):
    """Generators of the latest batches of a thread, by device."""

    def __init__(self) -> None:
        self.latest: dict[torch.device | str, SampleRng] = {}
        self.references = 0
        """References to a generator that `rng_of_batch` alone uses."""


_generators = _LatestGenerators()


def rng_of_batch(seed: int, epoch: int, batch: int, part: int, device: torch.device | str = "cpu") -> SampleRng:
    """Returns the generator of a batch, equal to a new one.

    A new generator costs ten times as much as a seed. So this seeds that of the previous batch in the same thread,
    unless something else refers to it.
    """
    latest = _generators.latest
    found = latest.get(device)
    if found is not None and sys.getrefcount(found) <= _generators.references:
        return found.begin(seed, epoch, batch, part)
    found = latest[device] = SampleRng(seed, epoch, batch, part, device=device)
    _generators.references = sys.getrefcount(found)
    return found
