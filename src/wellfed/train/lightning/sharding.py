"""Has Lightning shard a model over several cards (FSDP): in which types, and how to have the whole of it.

torch's part is imported where it is used: few runs shard.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from torch import Tensor, nn

from wellfed.train.memory.fsdp_blocks import blocks_to_gather


def fsdp_strategy(timeout: timedelta) -> FSDPStrategy:
    """Blocks are gathered one after the other; weights, buffers and inputs keep the types they have on one card."""
    from torch.distributed.fsdp import MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    gathered: set[nn.Module] = set()

    def is_gathered(module: nn.Module) -> bool:
        if isinstance(module, pl.LightningModule):  # the first that is asked for: the whole
            gathered.update(blocks_to_gather(module))
        return module in gathered

    # Rank 0's weights count, as with DDP: it alone reads and writes checkpoints.
    return FSDPStrategy(
        timeout=timeout,
        auto_wrap_policy=CustomPolicy(is_gathered),
        mixed_precision=MixedPrecision(),
        sync_module_states=True,
    )


def all_weights(strategy: Strategy) -> AbstractContextManager[Any]:
    """Within it every rank has the whole model on its device; all ranks must enter. Nothing to do where none shards."""
    if not isinstance(strategy, FSDPStrategy):
        return nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.summon_full_params(strategy.model, writeback=False)


class KeepWeights(pl.Callback):
    """Has the whole model's weights, in host memory on every rank, when training has ended.

    A model that was sharded once can't be sharded anew: what comes after training begins with another one.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
        whole: Any = trainer.strategy.model
        with FullyShardedDataParallel.state_dict_type(whole, StateDictType.FULL_STATE_DICT, config):
            self.weights = whole.state_dict()
