"""Shards a LightningModule over several cards (FSDP). FSDP is imported at its use, since few runs shard."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from wellfed.train.memory.checkpointing import blocks_to_gather


class _ShardsOnce(FSDPStrategy):
    """Reuses the shards of a module that an earlier Trainer has sharded: a shard can't be sharded again."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        sharded: Any = vars(model).get("_sharded_by_wellfed")
        if sharded is None:
            sharded = vars(model)["_sharded_by_wellfed"] = super()._setup_model(model)
        # Lightning refuses to clip, since its precision does not know the outermost module.
        precision: Any = self.precision_plugin
        precision.clip_grad_by_norm = lambda optimizer, limit: sharded.clip_grad_norm_(limit)
        return sharded  # type: ignore[no-any-return]


def fsdp_strategy(timeout: timedelta) -> FSDPStrategy:
    """Returns a strategy that gathers block by block. Weights, buffers and inputs keep their types."""
    from torch.distributed.fsdp import MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    gathered: set[nn.Module] = set()

    def is_gathered(module: nn.Module) -> bool:
        if isinstance(module, pl.LightningModule):  # comes first
            gathered.update(blocks_to_gather(module))
        return module in gathered

    # Rank 0's weights are used, as with DDP, since it alone reads and writes checkpoints.
    return _ShardsOnce(
        timeout=timeout,
        auto_wrap_policy=CustomPolicy(is_gathered),
        mixed_precision=MixedPrecision(),
        sync_module_states=True,
    )
