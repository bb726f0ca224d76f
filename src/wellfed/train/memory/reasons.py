"""Describes why memory ran out: what holds it and what would need less, or that it grew with every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import psutil
import torch
from torch import Tensor, nn, optim

from wellfed.contract import FeatureSource
from wellfed.errors import LESS_HOST_MEMORY
from wellfed.train.memory.features import DeviceTable
from wellfed.train.memory.oom import Kind
from wellfed.train.memory.step_start import bytes_of
from wellfed.units import GIB, MIB, show_bytes

_DENSE, _EVERY_FIRST, _EVERY = 32, 4, 32
"""Steps with a reading every `_EVERY_FIRST` steps, and steps between later readings. A reading takes 10 to 50 us."""
_FEWEST, _MOST = 4, 8
"""Minimum and maximum number of latest readings that are compared."""
_SMALLEST_FRAC = 0.05
"""Minimum growth since the first reading, as a fraction of the memory in use."""
_STEADY_FRAC = 0.5
"""Minimum growth a step between two readings, as a fraction of the mean."""


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


class MemoryGrowth:
    """Readings of the memory in use after steps: what the allocator has given out, on a CPU the process's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: tuple[int, int] | None = None
        self._latest: deque[tuple[int, int]] = deque(maxlen=_MOST)
        """Step and bytes of the latest readings."""

    def _read(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return int(psutil.Process().memory_info().rss)

    def note(self, step: int) -> None:
        """Reads the memory after some of the steps; call it after each."""
        if step % (_EVERY_FIRST if step <= _DENSE else _EVERY) == 0:
            self._latest.append((step, self._read()))
            self._first = self._first or self._latest[-1]

    def describe(self) -> str:
        """Returns the growth in a sentence with the way out; empty unless memory grew between all latest readings."""
        if self._first is None or len(self._latest) < _FEWEST:
            return ""
        (first, first_bytes), (last, last_bytes) = self._first, self._latest[-1]
        mean = (last_bytes - first_bytes) / (last - first)
        slopes = [(late - early) / (end - start) for (start, early), (end, late) in pairwise(self._latest)]
        if min(slopes) < _STEADY_FRAC * mean or last_bytes - first_bytes < _SMALLEST_FRAC * last_bytes:
            return ""
        return (
            f"Memory grew with every step, by {mean / MIB:.3g} MiB a step over {last - first} steps, from "
            f"{first_bytes / GIB:.2f} to {last_bytes / GIB:.2f} GiB: something keeps tensors of past steps, such as a "
            "list of losses or outputs that were not detached. Keep loss.item() or loss.detach().cpu(). A smaller "
            "micro-batch would only delay it."
        )
