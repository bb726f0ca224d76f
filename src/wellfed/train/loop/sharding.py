"""Shards a model over several cards (FSDP), and collects whole weights and optimizer states again.

FSDP is imported at its use, since few runs shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.strategies import FSDPStrategy
from torch import Tensor, nn

from wellfed.train.memory.fsdp_blocks import blocks_to_gather


def fsdp_strategy(timeout: timedelta, whole: type[nn.Module]) -> FSDPStrategy:
    """Returns a strategy that gathers a module of type ``whole`` block by block."""
    return FSDPStrategy(timeout=timeout, **fsdp_options(whole))


def fsdp_options(whole: type[nn.Module]) -> dict[str, Any]:
    """Returns arguments of FSDP with which weights, buffers and inputs keep their types.

    Args:
        whole: type of the outermost module.
    """
    from torch.distributed.fsdp import MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    gathered: set[nn.Module] = set()

    def is_gathered(module: nn.Module) -> bool:
        if isinstance(module, whole):  # comes first
            gathered.update(blocks_to_gather(module))
        return module in gathered

    # Rank 0's weights are used, as with DDP, since it alone reads and writes checkpoints.
    policy, types = CustomPolicy(is_gathered), MixedPrecision()
    return {"auto_wrap_policy": policy, "mixed_precision": types, "sync_module_states": True}


def gathered(wrapper: nn.Module) -> AbstractContextManager[Any]:
    """Returns a context in which each rank has the whole model on its device. All ranks must enter it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.summon_full_params(wrapper, writeback=False)


def sharded_scaler() -> torch.amp.GradScaler:
    """Returns a scaler that finds NaN and infinity in the shards of all ranks."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler()


def _full(wrapper: nn.Module, *, rank0_only: bool) -> AbstractContextManager[Any]:
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    return FullyShardedDataParallel.state_dict_type(
        wrapper,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only),
    )


def whole_weights(wrapper: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of the whole model on rank 0, in host memory."""
    with _full(wrapper, rank0_only=True):
        return wrapper.state_dict()


def load_whole_weights(wrapper: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads the weights of the whole model, which each rank has."""
    with _full(wrapper, rank0_only=False):
        wrapper.load_state_dict(weights)


def whole_optimizer_state(wrapper: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the optimizer's state of the whole model on rank 0, numbered as that of a model on one device."""
    from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

    with _full(wrapper, rank0_only=True):
        state = FullyShardedDataParallel.optim_state_dict(wrapper, optimizer)
        if torch.distributed.get_rank() == 0:
            state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, wrapper)
        return state


def load_whole_optimizer_state(wrapper: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the optimizer's state of the whole model, which each rank has."""
    from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

    with _full(wrapper, rank0_only=False):
        named = FullyShardedDataParallel.rekey_optim_state_dict(dict(state), OptimStateKeyType.PARAM_NAME, wrapper)
        own = FullyShardedDataParallel.optim_state_dict_to_load(wrapper, optimizer, named)
        optimizer.load_state_dict(own)
