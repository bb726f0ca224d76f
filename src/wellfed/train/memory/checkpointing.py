"""Adds activation checkpointing to any module: its repeated blocks recompute their activations."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the trainable members of the outermost ``nn.ModuleList`` and ``nn.Sequential`` containers. Members without
    trainable parameters are skipped, since checkpointing them saves no memory."""
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        yield from (member for member in model if any(p.requires_grad for p in member.parameters()))
        return
    for child in model.children():
        yield from blocks(child)


def checkpoint_blocks(model: nn.Module) -> int:
    """Makes every block recompute its activations in the backward pass; returns the number of blocks. Results are bit
    for bit the same, dropout included: torch restores the generator for the second pass."""
    found = list(blocks(model))
    for block in found:
        # A bound method instead of a closure, so that a deep copy of the model runs its own parameters.
        block.forward = types.MethodType(_recomputing, block)
    return len(found)


def is_checkpointed(model: nn.Module) -> bool:
    """Returns whether `checkpoint_blocks` was called for this model."""
    return any(getattr(block.__dict__.get("forward"), "__func__", None) is _recomputing for block in blocks(model))


def _recomputing(block: nn.Module, *arguments: Any, **named: Any) -> Any:
    forward = type(block).forward
    if not block.training:
        return forward(block, *arguments, **named)
    return checkpoint(forward, block, *arguments, use_reentrant=False, **named)
