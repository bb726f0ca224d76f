"""Shards a user's LightningModule over several cards (FSDP). FSDP is imported at its use, since few runs shard."""

from __future__ import annotations

from datetime import timedelta

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from wellfed.train.loop.sharding import fsdp_options


class _ShardsOnce(FSDPStrategy):
    """Reuses the shards of a module that an earlier Trainer has sharded: a shard can't be sharded again."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        sharded: nn.Module | None = vars(model).get("_sharded_by_wellfed")
        if sharded is None:
            sharded = vars(model)["_sharded_by_wellfed"] = super()._setup_model(model)
        return sharded


def fsdp_strategy(timeout: timedelta) -> FSDPStrategy:
    """Returns a strategy that gathers block by block. Weights, buffers and inputs keep their types."""
    return _ShardsOnce(timeout=timeout, **fsdp_options(pl.LightningModule))
