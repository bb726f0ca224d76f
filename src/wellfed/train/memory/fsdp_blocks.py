"""Names the blocks of a sharded model (FSDP) that each device gathers, one after the other, and what that takes."""

from __future__ import annotations

from collections import Counter

from torch import nn

from wellfed.train.memory.checkpointing import blocks

LEAST_WEIGHTS = 100_000
"""A block with fewer weights stays with the whole: to gather it is a message between the cards, whatever its size."""


def blocks_to_gather(model: nn.Module) -> list[nn.Module]:
    """Those of `checkpointing.blocks` that are large enough and have their weights to themselves."""
    uses = _uses(model)
    return [
        block
        for block in blocks(model)
        if sum(weight.numel() for weight in block.parameters()) >= LEAST_WEIGHTS
        and all(uses[weight] == count for weight, count in _uses(block).items())
    ]


def gathered_bytes(model: nn.Module) -> int:
    """At most so much is there beside the shards: weights that are whole, and their gradients before they are sharded.

    What is in no block is whole from the start of the forward pass to the end of the backward pass. In that, a block's
    weights are gathered while the next one's gradients are computed, and gradients exist twice for a moment: weight by
    weight, and as the one tensor that is summed over the devices.
    """
    sizes = sorted((_num_bytes(block) for block in blocks_to_gather(model)), reverse=True)
    rest = _num_bytes(model) - sum(sizes)
    return rest + max(2 * rest, sum(sizes[:2]) + 2 * sum(sizes[:1]))


def _num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """By how many of its modules each weight is held."""
    held = (weight for each in module.modules() for weight in each._parameters.values())
    return Counter(weight for weight in held if weight is not None)
