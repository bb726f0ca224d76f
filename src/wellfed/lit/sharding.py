"""A model sharded over several cards (FSDP): which parts are gathered at a time, in which types, and the whole of it.

torch's part is imported where it is used: few runs shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from torch import Tensor, nn

from wellfed.memory.checkpointing import blocks

LEAST_WEIGHTS = 100_000
"""A block with fewer weights stays with the whole: to gather it is a message between the cards, whatever its size."""


def fsdp_strategy() -> FSDPStrategy:
    """Blocks are gathered one after the other; weights, buffers and inputs keep the types they have on one card."""
    from torch.distributed.fsdp import MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    gathered: set[nn.Module] = set()

    def is_gathered(module: nn.Module) -> bool:
        if isinstance(module, pl.LightningModule):  # the first that is asked for: the whole
            gathered.update(blocks_to_gather(module))
        return module in gathered

    return FSDPStrategy(auto_wrap_policy=CustomPolicy(is_gathered), mixed_precision=MixedPrecision())


def blocks_to_gather(model: nn.Module) -> list[nn.Module]:
    """Those of `checkpointing.blocks` that are large enough and have their weights to themselves."""
    uses = Counter(_weights_of_each_module(model.modules()))
    found = []
    for block in blocks(model):
        own = Counter(_weights_of_each_module(block.modules()))
        is_large = sum(weight.numel() for weight in block.parameters()) >= LEAST_WEIGHTS
        if is_large and all(uses[weight] == count for weight, count in own.items()):
            found.append(block)
    return found


def _weights_of_each_module(modules: Iterable[nn.Module]) -> Iterator[int]:
    for module in modules:
        for weight in module._parameters.values():
            if weight is not None:
                yield id(weight)


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
