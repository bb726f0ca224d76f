"""Finds the repeated blocks of any module: to recompute their activations, or to gather them one by one (FSDP)."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LEAST_WEIGHTS = 100_000
"""Minimum number of weights of a block that is gathered separately. Each gathering costs a message."""


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
    for bit the same. Torch restores the generator for the second pass, and `_BuffersBefore` the buffers. A compiled
    step updates buffers once anyway, unless torch.compile breaks its graph within a block."""
    found = list(blocks(model))
    for block in found:
        # A bound method instead of a closure, so that a deep copy of the model runs its own parameters.
        block.forward = types.MethodType(_recomputing, block)
    return len(found)


def is_checkpointed(model: nn.Module) -> bool:
    """Returns whether `checkpoint_blocks` was called for this model."""
    return any(getattr(block.__dict__.get("forward"), "__func__", None) is _recomputing for block in blocks(model))


class _BuffersBefore:
    """Buffers of a block before its forward pass. Within the context the block runs on copies of them, so a second pass
    sees the same state (spectral norm) and does not update it again (statistics of BatchNorm).

    One copy is held from the forward to the backward pass, and another while the block runs again. Large constant
    tables are copied too, since a block may write to any buffer."""

    def __init__(self, block: nn.Module) -> None:
        self._copies = [
            (module._buffers, name, buffer.clone())
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def __enter__(self) -> None:
        # A second backward pass enters again. All are copied before the first swap, since memory may run out.
        fresh = [(buffers, name, copy.clone()) for buffers, name, copy in self._copies]
        self._own = [(buffers, name, buffers[name]) for buffers, name, _ in self._copies]
        for buffers, name, copy in fresh:
            buffers[name] = copy

    def __exit__(self, *_: object) -> None:
        for buffers, name, buffer in self._own:
            buffers[name] = buffer
        self._own.clear()


def _recomputing(block: nn.Module, *arguments: Any, **named: Any) -> Any:
    forward = type(block).forward
    if not (block.training and torch.is_grad_enabled()):
        return forward(block, *arguments, **named)
    if torch.compiler.is_compiling():  # its graphs take no such context
        return checkpoint(forward, block, *arguments, use_reentrant=False, **named)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _BuffersBefore(block)

    return checkpoint(forward, block, *arguments, use_reentrant=False, context_fn=contexts, **named)


def blocks_to_gather(model: nn.Module) -> list[nn.Module]:
    """Returns those of `blocks` that are large enough and share no weight."""
    uses = _uses(model)
    return [
        block
        for block in blocks(model)
        if sum(weight.numel() for weight in block.parameters()) >= LEAST_WEIGHTS
        and all(uses[weight] == count for weight, count in _uses(block).items())
    ]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(weight for each in module.modules() for weight in each._parameters.values() if weight is not None)
