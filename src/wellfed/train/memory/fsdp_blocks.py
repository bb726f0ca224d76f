"""Names the blocks of a sharded model (FSDP) that each device gathers in turn, and the bytes that this takes."""

from __future__ import annotations

from collections import Counter

from torch import nn

from wellfed.train.memory.checkpointing import blocks

LEAST_WEIGHTS = 100_000
"""Weights of a block from which on it is gathered alone: each gathering is a message, whatever its size."""


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
    """Returns the largest number of bytes beside the shards: gathered weights, and gradients before they are sharded.

    Weights in no block are gathered from the start of the forward pass to the end of the backward pass. A block's
    weights are gathered while the next block's gradients are computed. Gradients exist twice for a moment: weight by
    weight, and as the one tensor that is summed over the devices.
    """
    sizes = sorted((_num_bytes(block) for block in blocks_to_gather(model)), reverse=True)
    rest = _num_bytes(model) - sum(sizes)
    return rest + max(2 * rest, sum(sizes[:2]) + 2 * sum(sizes[:1]))


def _num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Counts the modules that hold each weight."""
    held = (weight for each in module.modules() for weight in each._parameters.values())
    return Counter(weight for weight in held if weight is not None)
