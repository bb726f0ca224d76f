"""Adds device prefetch between a loader and the model that trains on it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from wellfed.batches import Delivery
from wellfed.data.device_prefetch import DevicePrefetcher
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.memory import oom

_LOG = logging.getLogger(__name__)


@contextmanager
def prefetched(model: PlacedModel, loader: Any, ahead: int, *, is_training: bool) -> Iterator[Any]:
    """Yields the loader, or one that copies ``ahead`` of its batches to the device before they are needed."""
    if ahead == 0:
        yield loader
        return

    def weigh(delivery: Delivery) -> None:  # while the batch is on the host
        if is_training and model.step is not None:
            model.step.passes.weigh(delivery)

    model.begin()
    with closing(DevicePrefetcher(loader, model.device, ahead, before_move=weigh, no_room=no_room)) as prefetcher:
        yield prefetcher


def no_room(error: Exception) -> bool:
    """Returns whether memory ran out, which is logged."""
    failure = oom.classify(error)
    if failure is not None:
        _LOG.info("No room on the device for another batch ahead of the step: %s", failure.message)
    return failure is not None
