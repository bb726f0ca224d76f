"""Activation checkpointing for any module: repeated blocks forget their activations and compute them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The trainable members of the outermost ``nn.ModuleList`` and ``nn.Sequential`` containers.

    These are what models repeat; a member without trainable parameters saves nothing.
    """
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from (member for member in child if any(p.requires_grad for p in member.parameters()))
        else:
            yield from blocks(child)


def checkpoint_blocks(model: nn.Module) -> int:
    """Make every block recompute its activations in the backward pass; the number of blocks.

    Results are bit for bit the same, dropout included: torch restores the generator for the second pass.
    """
    found = list(blocks(model))
    for block in found:
        forward = block.forward

        def recomputing(*arguments: Any, _forward: Any = forward, _block: nn.Module = block, **named: Any) -> Any:
            if not _block.training:
                return _forward(*arguments, **named)
            return checkpoint(_forward, *arguments, use_reentrant=False, **named)

        block.forward = recomputing
    return len(found)
