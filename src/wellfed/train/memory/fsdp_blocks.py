"""Selects the blocks of a sharded model (FSDP) that each device gathers in turn, and computes the bytes for that."""

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


def gathered_bytes(model: nn.Module) -> int:
    """Returns the largest number of bytes besides the shards: gathered weights, and gradients before they are sharded.

    Weights outside of blocks are gathered for the whole forward and backward pass. A block's weights are gathered while
    the next block's gradients are computed. Gradients briefly exist twice: per weight, and as the one tensor that is
    summed over the devices.
    """
    sizes = sorted((_num_bytes(block) for block in blocks_to_gather(model)), reverse=True)
    rest = _num_bytes(model) - sum(sizes)
    return rest + max(2 * rest, sum(sizes[:2]) + 2 * sum(sizes[:1]))


def _num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(weight for each in module.modules() for weight in each._parameters.values() if weight is not None)
