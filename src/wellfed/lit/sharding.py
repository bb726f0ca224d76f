"""A model sharded over several cards (FSDP): which parts are gathered at a time, and its precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import _Policy

from wellfed.memory.checkpointing import blocks

LEAST_WEIGHTS = 100_000
"""A block with fewer weights stays with the whole: to gather it is a message between the cards, whatever its size."""


def fsdp_strategy() -> FSDPStrategy:
    """Blocks are gathered one after the other; weights, buffers and inputs keep the types that they have on one card."""
    return FSDPStrategy(auto_wrap_policy=WrapBlocks(), mixed_precision=MixedPrecision())


class WrapBlocks(_Policy):
    """The blocks that the model repeats, each gathered when its turn comes; without it the whole model is, at once.

    A block that shares a weight with another part of the model stays with the whole.
    """

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        return {block: root_kwargs for block in blocks_to_gather(root_module) if block not in ignored_modules}


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


def _weights_of_each_module(modules: Iterable[nn.Module]) -> Iterable[int]:
    for module in modules:
        for weight in module._parameters.values():
            if weight is not None:
                yield id(weight)
