"""Yields the batches of a validation or test split: every sample once, over all ranks or on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from wellfed.batches import Delivery
from wellfed.contract import Batch
from wellfed.data.backends.bad_samples import BadSamples
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_source import BatchSource
from wellfed.data.epoch_order import EpochOrder
from wellfed.data.settings import LoaderSettings


class EvalLoader:
    """Yields a split in its own order, from its start at each ``iter()``.

    The batches are the same for any number of ranks: rank r has the batches r, r + world_size, and so on. So a rank may
    have one batch less than another.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        settings: LoaderSettings | None = None,
        rank: int = 0,
        world_size: int = 1,
        collate: Callable[[list[Any]], Batch] | None = None,
        limit_batches: int | None = None,
    ) -> None:
        """
        Args:
            settings: backend and workers; None = this process builds each batch on request.
        """
        self._order = EpochOrder(len(dataset), batch_size, seed=seed, shuffle=False, limit_batches=limit_batches)
        self._dataset = dataset
        self._numbers = range(rank, self._order.num_batches, world_size)
        self._most = -(-self._order.num_batches // world_size)
        settings, num_own = settings or LoaderSettings(), len(self._numbers)
        if num_own < 2:  # nothing to build ahead
            settings = LoaderSettings(pin_memory=settings.pin_memory)
        most = min(settings.num_workers, num_own)
        self.settings = replace(settings, num_workers=most, skip_ids=(), max_skipped=0)
        """Backend and workers that build the batches."""
        builder = BatchBuilder(dataset, seed, collate=collate, purpose="evaluation")
        bad = BadSamples(type(dataset).__name__, self.settings, purpose="evaluation")
        self._source = BatchSource(builder, self.settings, bad)

    def __len__(self) -> int:
        return self._most

    def __iter__(self) -> Iterator[Delivery]:
        self._order.check_length(self._dataset)
        return self._source.start(self._order.shares(0, self._numbers), len(self._numbers))

    def state_dict(self) -> dict[str, Any]:
        """Returns the start position, where each pass begins."""
        return {"epoch": 0, "batch": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: a pass is never resumed in the middle."""

    def close(self) -> None:
        """Ends persistent worker processes."""
        self._source.close()
