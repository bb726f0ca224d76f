"""Weighs the gradients of ranks so that each sample counts once, for a user's LightningModule."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from wellfed.train.lightning.callbacks.clock import delivery_of


class RankShares(pl.Callback):
    """Weights of a rank's gradients by its share of the step's samples, applied before the ranks average them.

    DDP has a hook for that. FSDP has none, so the loss is weighed before its backward pass.

    The module's loss is a mean over the samples of its rank. Shares of the last step of an epoch may differ. A plain
    average would then overweigh the samples of a smaller share, and count the padding of an empty one.
    """

    def __init__(self) -> None:
        self._factor = 1.0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        if isinstance(strategy.model, DistributedDataParallel):
            strategy.model.register_comm_hook(None, self._weigh)
        else:
            strategy.backward = partial(self._backward, strategy.backward)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        delivery = delivery_of(trainer, batch)
        own = 0 if delivery is None or delivery.is_padding else delivery.size
        self._factor = 1.0 if delivery is None else own * trainer.world_size / delivery.total

    def _backward(self, backward: Callable[..., None], loss: torch.Tensor, *more: Any, **named: Any) -> None:
        if self._factor != 1:  # padding may have a NaN, which times 0 stays one
            loss = (loss if self._factor else loss.nan_to_num(0.0, 0.0, 0.0)) * self._factor
        backward(loss, *more, **named)

    # DDP reads the annotations as types, so this file can't import `annotations` from __future__.
    def _weigh(self, group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._factor == 0:
            bucket.buffer().zero_()
        elif self._factor != 1:
            bucket.buffer().mul_(self._factor)
        return allreduce_hook(group, bucket)
