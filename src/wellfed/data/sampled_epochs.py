"""Reads the indices of each epoch from a DataLoader's sampler, so that a repeated epoch has the same indices.

All generators are seeded by (seed, epoch) while a sampler draws, and restored after. Torch's own samplers, and samplers
with ``set_epoch`` or without a generator, can then repeat any epoch. Other samplers are read epoch by epoch, so that a
resumed run repeats them too. A checkpoint holds a checksum of the epoch's indices, which a resumed run compares.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from wellfed import generators
from wellfed.errors import DataError
from wellfed.record import OnEvent, ignore_event
from wellfed.sample_rng import seed_from

_LOG = logging.getLogger(__name__)
_KEPT, _FEWEST_KEPT = 2**22, 4
"""Maximum number of indices kept of earlier epochs, and minimum number of epochs kept."""
_ENDLESS = 100
"""Multiple of the dataset's length after which a sampler without a length counts as endless."""


class SampledEpochs:
    """The indices of each epoch, from a sampler or a batch sampler; all epochs are as long as the first.

    Args:
        sampler: yields indices, or lists of indices with ``in_batches``.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, dataset_length: int, *, in_batches: bool = False) -> None:
        self._sampler, self._seed, self._dataset_length, self.in_batches = sampler, seed, dataset_length, in_batches
        self._is_torchs = type(sampler).__module__.startswith("torch.utils.data")
        self._is_free = self._is_torchs or callable(getattr(sampler, "set_epoch", None))
        """Whether epochs may be requested in any order."""
        self._kept: dict[int, list[Tensor]] = {}
        self._inexact: set[int] = set()
        """Epochs already warned about."""
        self._has_cut = False
        """Whether a cut epoch was warned about."""
        self._next = 0
        """Next epoch of a sampler with its own state."""
        self._what = "batches" if in_batches else "indices"

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
                self._kept[number] = self._as_long_as_first(self._draw(number), number)
            self._next = max(self._next, epoch + 1)
            self._forget(epoch)
        return self._kept[epoch]

    def checksum(self, epoch: int) -> int:
        """Returns a checksum of an epoch's indices."""
        return zlib.crc32(self.indices(epoch).long().numpy().tobytes())

    def compare(self, epoch: int, checksum: int, on_event: OnEvent = ignore_event) -> None:
        """Warns once, and sends a ``resume_inexact``, if a resumed epoch has other indices than before."""
        if self.checksum(epoch) != checksum and epoch not in self._inexact:
            self._inexact.add(epoch)
            on_event("resume_inexact", epoch=epoch)
            _LOG.warning(
                "%s gives other samples for epoch %d than it gave before this run was resumed. The rest of the epoch "
                "is the rest of its new order, so samples may come twice or not at all. Give it set_epoch(epoch), and "
                "let it draw by that alone.",
                self.name, epoch,
            )  # fmt: skip

    def _forget(self, latest: int) -> None:
        """Drops early epochs once many are kept. The first stays, and a few that timing loaders request ahead."""
        length = sum(map(len, self._kept[0]))
        most = max(_FEWEST_KEPT, _KEPT // length)
        for number in sorted(self._kept.keys() - {0, latest})[: max(0, len(self._kept) - most)]:
            del self._kept[number]

    def _as_long_as_first(self, drawn: list[Tensor], epoch: int) -> list[Tensor]:
        """Returns the indices cut to the length of the first epoch, which determines the number of steps."""
        first = self._kept[0]
        if not self.in_batches:
            drawn, given, wanted = [drawn[0][: len(first[0])]], len(drawn[0]), len(first[0])
        else:
            drawn, given, wanted = drawn[: len(first)], len(drawn), len(first)
        lengths = f"{self.name} gave {wanted} {self._what} for the first epoch and {given} for epoch {epoch}"
        way_out = "Let it give as many in each, or set loader=own, which reads what comes."
        if given < wanted:
            raise DataError(f"{lengths}: epochs must be of one length. {way_out}")
        if given > wanted and not self._has_cut:
            self._has_cut = True
            _LOG.warning("%s: the last %d are left out, as in all longer epochs. %s", lengths, given - wanted, way_out)
        return drawn

    def _draw(self, epoch: int) -> list[Tensor]:
        sampler: Any = self._sampler
        each: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
        for one in each:
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(epoch)
        seed, own = seed_from(self._seed, epoch), getattr(sampler, "generator", None)
        if self._is_torchs and isinstance(own, torch.Generator):
            own.manual_seed(seed)
        with generators.kept():
            generators.seed_for_sample(seed)
            given = list(islice(sampler, self._most() + 1))
        if len(given) > self._most() and not hasattr(sampler, "__len__"):
            raise DataError(
                f"{self.name} gave {len(given)} indices of {self._dataset_length} samples and did not end. "
                "Give it __len__: the indices of an epoch."
            )
        if len(given) > self._most() and not self._has_cut:
            self._has_cut = True
            _LOG.warning(
                "%s gave more %s than its __len__ of %d for epoch %d: the rest is left out, in each epoch. "
                "If samples are missing, correct __len__, or set loader=own, which reads what comes.",
                self.name, self._what, self._most(), epoch,
            )  # fmt: skip
        del given[self._most() :]
        if not given:
            raise DataError(f"{self.name} gave no indices for epoch {epoch}. Check what it draws from.")
        return [self._tensor(batch) for batch in given] if self.in_batches else [self._tensor(given)]

    def _most(self) -> int:
        sampler: Any = self._sampler
        return len(sampler) if hasattr(sampler, "__len__") else _ENDLESS * max(1, self._dataset_length)

    def _tensor(self, indices: Sequence[Any]) -> Tensor:
        try:
            found = torch.tensor([_whole(index) for index in indices], dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._no_indices(indices) from error
        if not len(found):
            raise DataError(f"{self.name} gave a batch without an index. Let it leave such batches out.")
        if int(found.min()) < 0 or int(found.max()) >= self._dataset_length:
            problem = f"{self.name} gave index {int(found.max() if found.max() > 0 else found.min())}"
            raise DataError(f"{problem}, and there are {self._dataset_length} samples, counted from 0.")
        return found.to(index_type(self._dataset_length))

    def _no_indices(self, given: Sequence[Any]) -> DataError:
        sample = next(iter(given), None) if isinstance(given, (list, tuple)) else given
        what = "lists of whole numbers" if self.in_batches else "whole numbers"
        return DataError(
            f"{self.name} gave {sample!r} ({type(sample).__name__}), and only {what} can be dealt out to workers. "
            "Set loader=own, which leaves the DataLoader as it came."
        )


def index_type(num_samples: int) -> torch.dtype:
    """Returns the type that holds the indices of a dataset: half the memory of int64 is enough for most."""
    return torch.int32 if num_samples < 2**31 else torch.int64


def _whole(index: Any) -> int:
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(index)
    return int(index.__index__())
