"""Defines the request for one batch, and the answer: the batch, and the samples that could not be loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellfed import batches
from wellfed.batches import BuildTime
from wellfed.contract import Batch

_LISTED = 20
"""Maximum number of indices in a message."""


class LateBatch(Exception):
    """Raised by a backend if no batch came within loader.timeout_s."""


@dataclass(slots=True)
class BatchRequest:
    """One rank's share of the samples of a step, with its indices, so that workers do not need the order."""

    epoch: int
    batch: int
    """Number of the batch in its epoch, from 0."""
    indices: Tensor
    """Dataset indices, int32 or int64 ``[n]``; the dataset gets them as int64."""
    total: int = 0
    """Samples of the step over all ranks."""
    is_padding: bool = False
    """Whether this rank has no sample of a step with fewer samples than ranks. One index gives the shapes; its loss
    must not count."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As numpy, since sending a tensor to a worker costs a file descriptor and half a millisecond.
        return _from_numpy, (self.epoch, self.batch, self.indices.numpy())

    def only(self, index: int) -> BatchRequest:
        """Returns the same request for one sample."""
        return BatchRequest(self.epoch, self.batch, torch.tensor([index]))

    def place(self, purpose: str) -> str:
        """Returns the number of the batch, for messages about ``purpose`` (training, evaluation)."""
        return f"{purpose} batch {self.batch} of epoch {self.epoch}"

    def described(self, purpose: str) -> str:
        """Returns the batch and its first indices, for messages."""
        indices = self.indices.tolist()
        more = f" and {len(indices) - _LISTED} more" if len(indices) > _LISTED else ""
        listed = ", ".join(map(str, indices[:_LISTED]))
        return f"{self.place(purpose)} (sample{'s' * (len(indices) > 1)} {listed}{more})"


def _from_numpy(epoch: int, batch: int, indices: Any) -> BatchRequest:
    return BatchRequest(epoch, batch, torch.from_numpy(indices))


@dataclass
class LostSample:
    """A sample that could not be loaded."""

    index: int
    reason: str
    """Text for messages."""
    cause: BaseException | None = None
    """Exception that the dataset raised, or in place of it one with a worker's traceback."""


@dataclass(slots=True)
class BuiltBatch:
    """A built batch on its way from the worker.

    DataLoader pins objects with a `pin_memory` method; without this class a user's dataclass would stay unpinned.
    """

    batch: Batch
    """None if the request gave no batch."""
    lost: tuple[LostSample, ...] = ()
    """Samples left out, with an entry for each time that one was drawn."""
    took: BuildTime | None = None
    """None if unknown."""

    def pin_memory(self) -> BuiltBatch:
        """Returns the batch in page-locked memory."""
        return self if self.batch is None else replace(self, batch=batches.pin(self.batch))
