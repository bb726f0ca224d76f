"""Selects the blocks of a sharded model (FSDP) that each device gathers in turn."""

from __future__ import annotations

from collections import Counter

from torch import nn

from wellfed.train.memory.checkpointing import blocks

LEAST_WEIGHTS = 100_000
"""Minimum number of weights of a block that is gathered separately. Each gathering costs a message."""


def blocks_to_gather(model: nn.Module) -> list[nn.Module]:
    """Returns those of `checkpointing.blocks` that are large enough and share no weight."""
    uses = _uses(model)
    return [
        block
        for block in blocks(model)
        if sum(weight.numel() for weight in block.parameters()) >= LEAST_WEIGHTS
        and all(uses[weight] == count for weight, count in _uses(block).items())
    ]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(weight for each in module.modules() for weight in each._parameters.values() if weight is not None)
