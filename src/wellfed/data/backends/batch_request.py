"""A request for one batch, and the answer: the batch, and the samples that could not be loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellfed import batches
from wellfed.batches import BuildTime
from wellfed.contract import Batch

_LISTED = 20
"""Maximum number of indices that a message lists."""


@dataclass(slots=True)
class BatchRequest:
    """One batch to build. It carries its indices, so that workers need not know the order of the epoch."""

    epoch: int
    batch: int
    """Number of the batch in its epoch, from 0."""
    indices: Tensor
    """Long ``[n]``, dataset indices."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As numpy: sending a tensor to a worker costs a file descriptor and half a millisecond.
        return _from_numpy, (self.epoch, self.batch, self.indices.numpy())

    def only(self, indices: Tensor) -> BatchRequest:
        """Returns the same request with other indices."""
        return BatchRequest(self.epoch, self.batch, indices)

    def described(self, purpose: str) -> str:
        """Returns the batch and its first indices, for messages about ``purpose`` (training, evaluation)."""
        name = f"{purpose} batch {self.batch} of epoch {self.epoch}"
        indices = self.indices.tolist()
        if not indices:  # a stream has none
            return name
        listed = ", ".join(map(str, indices[:_LISTED]))
        more = len(indices) - _LISTED
        return f"{name} (sample{'s' * (len(indices) > 1)} {listed}{f' and {more} more' if more > 0 else ''})"


def _from_numpy(epoch: int, batch: int, indices: Any) -> BatchRequest:
    return BatchRequest(epoch, batch, torch.from_numpy(indices))


@dataclass
class LostSample:
    """A sample that could not be loaded."""

    index: int
    reason: str
    """Text for messages."""
    cause: BaseException | None = None
    """Exception that the dataset raised."""


@dataclass(slots=True)
class BuiltBatch:
    """A batch as it leaves the worker.

    DataLoader pins objects that have `pin_memory`. Without this class it would leave a user's dataclass unpinned.
    """

    batch: Batch
    """None if no batch could be built from the request."""
    lost: tuple[LostSample, ...] = ()
    took: BuildTime | None = None
    """None if the time is unknown."""

    def pin_memory(self) -> BuiltBatch:
        """Returns the same in page-locked memory."""
        return self if self.batch is None else replace(self, batch=batches.pin(self.batch))
