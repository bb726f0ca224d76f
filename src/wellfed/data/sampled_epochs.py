"""Reads the indices of each epoch from a DataLoader's sampler, so that a repeated epoch has the same indices.

All generators are seeded by (seed, epoch) while a sampler draws, and restored after. Torch's own samplers, and samplers
with ``set_epoch`` or without a generator, can then repeat any epoch. Other samplers are read epoch by epoch, so that a
resumed run repeats them too. A checkpoint holds a checksum of the epoch's indices, which a resumed run compares.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from wellfed import generators
from wellfed.errors import DataError
from wellfed.record.entries import OnEvent, ignore_event
from wellfed.sample_rng import seed_from

_LOG = logging.getLogger(__name__)
_KEPT = 4
"""Number of latest epochs whose indices are kept; timing loaders requests a few ahead."""
_ENDLESS = 100
"""Multiple of the dataset's length after which a sampler counts as endless."""
_OWN = "Set loader=own, which reads what comes."


class SampledEpochs:
    """The indices of each epoch, from a sampler or a batch sampler; epochs of different lengths are refused.

    Args:
        sampler: yields indices, or lists of indices with ``in_batches``.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, dataset_length: int, *, in_batches: bool = False) -> None:
        self._sampler, self._seed, self._dataset_length, self.in_batches = sampler, seed, dataset_length, in_batches
        self._is_torchs = type(sampler).__module__.startswith("torch.utils.data")
        self._is_free = self._is_torchs or callable(getattr(sampler, "set_epoch", None))
        """Whether epochs may be requested in any order."""
        self._kept: dict[int, list[Tensor]] = {}
        self._next = self._length = 0
        """Next epoch of a sampler with its own state."""
        self._has_warned = False

    @property
    def name(self) -> str:
        """Name of the sampler's class."""
        return type(self._sampler).__name__

    def indices(self, epoch: int) -> Tensor:
        """Returns the indices of an epoch in order, of `index_type`, ``[n]``."""
        return torch.cat(self.batches(epoch))

    def batches(self, epoch: int) -> list[Tensor]:
        """Returns the lists of a batch sampler, or all indices of a sampler as one list."""
        if 0 not in self._kept:
            self._kept[0], self._next = self._draw(0), 1
        if epoch not in self._kept:
            for number in range(epoch if self._is_free else min(self._next, epoch), epoch + 1):
                self._kept[number] = self._draw(number)
            self._next = max(self._next, epoch + 1)
            for number in sorted(self._kept.keys() - {0, epoch})[:-_KEPT]:
                del self._kept[number]
        return self._kept[epoch]

    def checksum(self, epoch: int) -> int:
        """Returns a checksum of an epoch's indices."""
        return zlib.crc32(self.indices(epoch).long().numpy().tobytes())

    def compare(self, epoch: int, checksum: int, on_event: OnEvent = ignore_event) -> None:
        """Warns once, and sends a ``resume_inexact``, if a resumed epoch has other indices than before."""
        if self.checksum(epoch) != checksum and not self._has_warned:
            self._has_warned = True
            on_event("resume_inexact", epoch=epoch)
            _LOG.warning(
                "%s gives other samples for epoch %d than it gave before this run was resumed. The rest of the epoch "
                "is the rest of its new order, so samples may come twice or not at all. Give it set_epoch(epoch), and "
                "let it draw by that alone.",
                self.name, epoch,
            )  # fmt: skip

    def _draw(self, epoch: int) -> list[Tensor]:
        sampler: Any = self._sampler
        each: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
        for one in each:
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(epoch)
        seed, own = seed_from(self._seed, epoch), getattr(sampler, "generator", None)
        if self._is_torchs and isinstance(own, torch.Generator):
            own.manual_seed(seed)
        most = len(sampler) if hasattr(sampler, "__len__") else _ENDLESS * max(1, self._dataset_length)
        with generators.kept():
            generators.seed_for_sample(seed)
            given = list(islice(sampler, most + 1))
        if len(given) > most:
            raise DataError(f"{self.name} gave over {most:,} of an epoch. Give it a __len__ that holds. {_OWN}")
        if epoch and len(given) != self._length:
            problem = f"gave {self._length} for the first epoch and {len(given)} for epoch {epoch}"
            raise DataError(f"{self.name} {problem}: epochs must be of one length. {_OWN}")
        self._length = len(given)
        try:
            lists = [list(map(_whole, each)) for each in given] if self.in_batches else [list(map(_whole, given))]
        except TypeError as error:
            what = "lists of whole numbers" if self.in_batches else "whole numbers"
            raise DataError(f"{self.name} gave {error}, and only {what} can be dealt out to workers. {_OWN}") from error
        return [self._checked(each) for each in lists]

    def _checked(self, indices: list[int]) -> Tensor:
        if not indices:
            raise DataError(f"{self.name} gave no indices for {'a batch' if self.in_batches else 'an epoch'}.")
        low, high = min(indices), max(indices)
        if low < 0 or high >= self._dataset_length:
            problem = f"{self.name} gave index {low if low < 0 else high}"
            raise DataError(f"{problem}, and there are {self._dataset_length} samples, counted from 0.")
        return torch.tensor(indices, dtype=index_type(self._dataset_length))


def index_type(num_samples: int) -> torch.dtype:
    """Returns the type that holds the indices of a dataset: half the memory of int64 is enough for most."""
    return torch.int32 if num_samples < 2**31 else torch.int64


def _whole(index: Any) -> int:
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(f"{index!r} ({type(index).__name__})")
    return int(index.__index__())
