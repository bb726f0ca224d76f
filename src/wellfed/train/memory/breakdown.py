"""Lists what holds device memory between two steps, and what would reduce it, for messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn, optim

from wellfed.contract import FeatureSource
from wellfed.errors import LESS_HOST_MEMORY
from wellfed.train.memory.features import DeviceTable
from wellfed.train.memory.oom import Kind
from wellfed.train.memory.step_start import bytes_of
from wellfed.units import show_bytes


def way_out(
    kind: Kind,
    model: nn.Module,
    optimizers: Sequence[optim.Optimizer],
    features: FeatureSource | None = None,
    *,
    precision: str,
    others: Sequence[str] = (),
) -> str:
    """Returns text with the largest users of memory, without activations, and overrides that need less.

    Args:
        kind: the memory that ran out.
        others: other ways to need less.
    """
    if kind == "host_oom":
        less = f"{LESS_HOST_MEMORY}, a smaller workload.model, or a machine with more memory"
        return f"It is the host's memory. Next: {less}."
    weights = list(model.parameters())
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    parts = {
        "parameters": sum(map(bytes_of, [*weights, *model.buffers()])),
        "gradients": sum(weight.nbytes for weight in weights if weight.requires_grad),
        "optimizer state": sum(value.nbytes for value in states if isinstance(value, Tensor)),
    }
    ways = list[str]()
    if precision != "bf16-true":
        ways.append(f"gpu.precision=bf16-true ({show_bytes(sum(parts.values()) // 2)} less)")
    if isinstance(features, DeviceTable):
        parts["feature table"] = features.table.nbytes
        ways.append(f"memory.features=dynamic ({show_bytes(features.table.nbytes)} less)")
    groups = [group for each in optimizers for group in each.param_groups]
    if any(group.get("foreach", False) is not False and not group.get("fused") for group in groups):
        ways.append("workload.optimizer.foreach=false (an optimizer's step without temporaries of all weights)")
    ways += [*others, "a card with more memory (gpu=...)", "a smaller workload.model, which learns something else"]
    largest = sorted(parts.items(), key=lambda part: -part[1])
    held = ", ".join(f"{name} {show_bytes(size)}" for name, size in largest if size)
    return f"Largest parts: {held}. Next: {'; or '.join(ways)}."
