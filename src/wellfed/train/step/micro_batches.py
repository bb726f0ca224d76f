"""Splits a batch into micro-batches, weighs them, and prepares each on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import Batch, FeatureSource
from wellfed.sample_rng import rng_of_batch


class MicroBatch(NamedTuple):
    """Samples of a step that a device computes together."""

    batch: Batch
    number: int
    """Position in the step, from 0."""
    size: int
    share: float
    """Share of the step's weight over all ranks, 0 to 1."""


class Preparation:
    """Splitting, weighing and ``on_device`` of a data set, before the model gets a micro-batch."""

    def __init__(self, dataset: Any, seed: int, model: Any = None) -> None:
        """``model``: its ``loss_weight`` is used if the data has no ``weight``."""
        self._seed = seed
        own = batches.methods(dataset)
        self._on_device: Callable[..., Batch] | None = own.get("on_device")
        self._weight: Callable[[Batch], int] | None = own.get("weight") or getattr(model, "loss_weight", None)
        self.has_on_device, self.has_own_weight = self._on_device is not None, self._weight is not None
        """Whether the data has ``on_device``, and whether data or model weigh batches."""
        self._split: Callable[[Batch, list[int]], list[Batch]] = own.get("split", batches.split)

    def split(self, batch: Batch, sizes: list[int]) -> list[Batch]:
        """Returns successive parts of a batch.

        Raises:
            DataError: a member of the batch can't be cut; the error names it.
        """
        return [batch] if len(sizes) == 1 else self._split(batch, sizes)

    def weight(self, part: Batch, num_samples: int) -> int:
        """Returns the weight of a part, over which its loss is a mean.

        Waits for the part's device if data or model compute it, for example as ``int(mask.sum())``.
        """
        return num_samples if self._weight is None else int(self._weight(part))

    def weights(self, delivery: Delivery, parts: list[Batch], sizes: list[int]) -> list[int]:
        """Returns the weight of each part: the noted one if the sizes are still those."""
        if delivery.weights is not None and delivery.weights[0] == sizes:
            return delivery.weights[1]
        return [self.weight(part, size) for part, size in zip(parts, sizes, strict=True)]

    def __call__(self, batch: Batch, delivery: Delivery, part: int, features: FeatureSource | None) -> Batch:
        """Returns the batch after the workload's ``on_device``."""
        if self._on_device is None:
            return batch
        device = next(batches.tensors(batch)).device
        rng = rng_of_batch(self._seed, delivery.epoch, delivery.index, part, device)
        return self._on_device(batch, rng) if features is None else self._on_device(batch, rng, features)
