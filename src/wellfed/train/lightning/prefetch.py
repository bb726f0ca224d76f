"""Adds device prefetch between a loader and the module that trains on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch

from wellfed import batches
from wellfed.data.device_prefetch import DevicePrefetcher
from wellfed.train.lightning.hooks import overrides, replaced
from wellfed.train.lightning.module import StepModule
from wellfed.train.memory import oom

_LOG = logging.getLogger(__name__)


@contextmanager
def prefetched(
    loader: Any, module: pl.LightningModule, device: torch.device, ahead: int, *, is_training: bool = True
) -> Iterator[Any]:
    """Yields the loader, or one that copies ``ahead`` of its batches to the device before they are needed.

    Calls the ``transfer_batch_to_device`` of a user's LightningModule, once a batch. A module that changes batches
    before (``on_before_batch_transfer``) needs ``ahead`` 0, as planned.
    """
    if ahead == 0:
        yield loader
        return
    ours = module if isinstance(module, StepModule) else None
    own: Callable[[Any, torch.device, int], Any] | None = None
    if ours is None and overrides(module, "transfer_batch_to_device"):
        own = module.transfer_batch_to_device
    move = batches.to_device if own is None else lambda batch, where: own(batch, where, 0)
    prefetcher = DevicePrefetcher(
        loader,
        device,
        ahead,
        move=move,
        before_move=ours.weigh if ours and is_training else None,
        no_room=no_room,
    )

    def transfer_batch_to_device(batch: Any, where: torch.device, number: int) -> Any:
        """Moves a batch, unless that is done: Lightning calls this for the batches of all loaders."""
        return batch if own is None or batch is prefetcher.latest else own(batch, where, number)

    with replaced(module, {} if own is None else {"transfer_batch_to_device": transfer_batch_to_device}):
        try:
            yield prefetcher
        finally:
            prefetcher.close()


def no_room(error: Exception) -> bool:
    """Returns whether memory ran out, which is logged."""
    failure = oom.classify(error)
    if failure is not None:
        _LOG.info("No room on the device for another batch ahead of the step: %s", failure.message)
    return failure is not None
