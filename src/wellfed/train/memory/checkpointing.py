"""Finds the repeated blocks of any module: to recompute their activations, or to gather them one by one (FSDP)."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
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
    """Makes every block recompute its activations in the backward pass; returns the number of those that did not.

    Results are bit for bit the same. Torch restores the generator for the second pass, and `_BuffersBefore` the
    buffers. A compiled step updates buffers once anyway, unless torch.compile breaks its graph within a block.
    """
    found = [block for block in blocks(model) if "forward" not in vars(block)]
    for block in found:
        # A bound method instead of a closure, so that a deep copy of the model runs its own parameters.
        block.forward = types.MethodType(_recomputing, block)
    return len(found)


class _BuffersBefore:
    """Buffers of a block before its forward pass. Within the context the block runs on copies of them, so a second pass
    sees the same state (spectral norm) and does not update it again (statistics of BatchNorm). All buffers are copied,
    also large constant tables, since a block may write to any."""

    def __init__(self, block: nn.Module) -> None:
        named = [(module._buffers, name) for module in block.modules() for name in module._buffers]
        self._places: list[tuple[dict[str, Any], str]] = [one for one in named if one[0][one[1]] is not None]
        self._copies = [buffers[name].clone() for buffers, name in self._places]

    def _swap(self, tensors: list[Tensor]) -> list[Tensor]:
        before = [buffers[name] for buffers, name in self._places]
        for (buffers, name), tensor in zip(self._places, tensors, strict=True):
            buffers[name] = tensor
        return before

    def __enter__(self) -> None:  # again in each backward pass
        self._own = self._swap([copy.clone() for copy in self._copies])

    def __exit__(self, *_: object) -> None:
        self._swap(self._own)


def _recomputing(block: nn.Module, *arguments: Any, **named: Any) -> Any:
    forward = type(block).forward
    if not (block.training and torch.is_grad_enabled()):
        return forward(block, *arguments, **named)
    if torch.compiler.is_compiling():  # its graphs take no such context
        return checkpoint(forward, block, *arguments, use_reentrant=False, **named)
    named["context_fn"] = lambda: (nullcontext(), _BuffersBefore(block))  # of the first and of the second pass
    return checkpoint(forward, block, *arguments, use_reentrant=False, **named)


def blocks_to_gather(model: nn.Module) -> list[nn.Module]:
    """Returns those of `blocks` that are large enough and share no weight."""

    def uses(module: nn.Module) -> Counter[nn.Parameter]:
        return Counter(weight for _, weight in module.named_parameters(remove_duplicate=False))

    of_model = uses(model)
    return [
        block
        for block in blocks(model)
        if sum(weight.numel() for weight in block.parameters()) >= LEAST_WEIGHTS
        and all(of_model[weight] == count for weight, count in uses(block).items())
    ]
