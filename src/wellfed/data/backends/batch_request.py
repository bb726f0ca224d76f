"""Says what a worker is asked for, and what comes back: a batch, and the samples that could not be loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellfed import batches
from wellfed.batches import BuildTime
from wellfed.contract import Batch


@dataclass(slots=True)
class BatchRequest:
    """One batch to build. It carries its indices, so that nobody else needs to know the order of the epoch."""

    epoch: int
    batch: int
    """Number of the batch in its epoch, from 0."""
    indices: Tensor
    """Long ``[n]``, dataset indices."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As numpy: a tensor costs a file descriptor and half a millisecond on its way to a worker.
        return _from_numpy, (self.epoch, self.batch, self.indices.numpy())

    def only(self, indices: Tensor) -> BatchRequest:
        """The same place with other indices."""
        return BatchRequest(self.epoch, self.batch, indices)

    def without(self, index: int) -> BatchRequest:
        """The same place with one index less."""
        return self.only(self.indices[self.indices != index])


def _from_numpy(epoch: int, batch: int, indices: Any) -> BatchRequest:
    return BatchRequest(epoch, batch, torch.from_numpy(indices))


@dataclass
class LostSample:
    """A sample that could not be loaded."""

    index: int
    reason: str
    """One line, for messages."""
    cause: BaseException | None = None
    """What the data raised; None where it hung or killed its worker."""


@dataclass(slots=True)
class BuiltBatch:
    """A batch as it leaves the worker. DataLoader pins what has `pin_memory`, and would leave a dataclass of the data's
    own unpinned."""

    batch: Batch
    """None if nothing could be built of what was asked for."""
    lost: tuple[LostSample, ...] = ()
    took: BuildTime | None = None
    """None: nobody could know."""

    def pin_memory(self) -> BuiltBatch:
        """The same in page-locked memory."""
        return self if self.batch is None else BuiltBatch(batches.pin(self.batch), self.lost, self.took)

    def with_lost(self, earlier: Iterable[LostSample]) -> BuiltBatch:
        """Names samples that were lost on the way here."""
        return BuiltBatch(self.batch, (*earlier, *self.lost), self.took)
