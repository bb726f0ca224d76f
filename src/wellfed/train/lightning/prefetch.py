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
from wellfed.train.lightning.hooks import overrides
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
    before = vars(module).get("transfer_batch_to_device")  # set by another loader
    if own is not None:
        # Lightning calls it for the batches of all loaders.
        module.transfer_batch_to_device = lambda batch, where, number: (
            batch if batch is prefetcher.latest else own(batch, where, number)
        )
    try:
        yield prefetcher
    finally:
        prefetcher.close()
        if before is not None:
            module.transfer_batch_to_device = before
        elif own is not None:
            del module.transfer_batch_to_device


def no_room(error: Exception) -> bool:
    """Returns whether memory ran out, which is logged."""
    failure = oom.classify(error)
    if failure is not None:
        _LOG.info("No room on the device for another batch ahead of the step: %s", failure.message)
    return failure is not None
