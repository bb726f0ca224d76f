"""Counts each sample once in the gradients of a user's own LightningModule that trains on several ranks."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from wellfed.train.lightning.callbacks.clock import delivery_of


class RankShares(pl.Callback):
    """Weighs a rank's gradients by its part of the step's samples before DDP averages them.

    The module's loss is a mean over what its rank was handed. Where a step does not divide by the ranks, the last of an
    epoch mostly, a plain average would count the samples of the smaller part more, and a sample that stands in for an
    empty part as if it were one.
    """

    def __init__(self) -> None:
        self._factor = 1.0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._weigh)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        delivery = delivery_of(trainer, batch)
        own = 0 if delivery is None or delivery.is_padding else delivery.size
        self._factor = 1.0 if delivery is None else own * trainer.world_size / delivery.total

    # DDP reads the annotations, which can't be texts therefore: no `annotations` from __future__ in this file.
    def _weigh(self, group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._factor == 0:
            bucket.buffer().zero_()
        elif self._factor != 1:
            bucket.buffer().mul_(self._factor)
        return allreduce_hook(group, bucket)
