"""Lists what holds device memory between two steps, and what would reduce it, for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from wellfed.contract import FeatureSource
from wellfed.train.memory.features import DeviceTable
from wellfed.train.memory.step_start import bytes_of
from wellfed.units import show_bytes


def bytes_by_part(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    features: FeatureSource | None = None,
    buckets: int = 0,
) -> dict[str, int]:
    """Returns the bytes that a step needs before any activation. For the optimizers, their current bytes.

    Args:
        buckets: bytes for sums of gradients over ranks.
    """
    weights = list(model.parameters())
    states = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
    return {
        "parameters": sum(map(bytes_of, [*weights, *model.buffers()])),
        "gradients": sum(each.nbytes for each in weights if each.requires_grad),
        "gradient buckets": buckets,
        "optimizer state": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
        "feature table": features.table.nbytes if isinstance(features, DeviceTable) else 0,
    }


def way_out(parts: Mapping[str, int], *, precision: str, batches_ahead: int, others: Sequence[str] = ()) -> str:
    """Returns text with the largest parts, and overrides that need less.

    Args:
        parts: result of `bytes_by_part`.
        others: other ways to need less.
    """
    ways = []
    if precision != "bf16-true":
        halved = sum(parts[name] for name in ("parameters", "gradients", "optimizer state")) // 2
        ways.append(f"gpu.precision=bf16-true ({show_bytes(halved)} less)")
    if parts["feature table"]:
        ways.append(f"memory.features=dynamic ({show_bytes(parts['feature table'])} less)")
    if batches_ahead:
        ways.append(f"loader.device_prefetch=0 ({batches_ahead} batches less)")
    ways += [*others, "a card with more memory (gpu=...)", "a smaller workload.model, which learns something else"]
    largest = sorted(parts.items(), key=lambda part: -part[1])
    held = ", ".join(f"{name} {show_bytes(size)}" for name, size in largest if size)
    return f"Largest parts: {held}. Next: {'; or '.join(ways)}."
