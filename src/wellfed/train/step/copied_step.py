"""Copies what an optimizer's step has changed from a rank that has taken the step to those that had no memory for it.

Ranks that train the same model take the same step, so that of one is that of all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SteppedState:
    """Weights, states and whatever else a step changes, in one order on all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer, more: Sequence[Tensor] = ()) -> None:
        self._numbers: list[tuple[dict[str, Any], str]] = []
        self._tensors = [each.detach() for each in more]
        self.can_be_copied = True
        shape: list[Any] = [tuple(each.shape) for each in more]
        states: list[tuple[dict[str, Any], bool]] = []
        for group in optimizer.param_groups:
            states.append((group, False))  # some count their steps there
            for weight in group["params"]:
                self._tensors.append(weight.detach())
                shape.append(tuple(weight.shape))
                states.append((optimizer.state.get(weight, {}), True))
        for state, is_of_weight in states:
            for name in sorted(state):
                value = state[name]
                if isinstance(value, Tensor):
                    self._tensors.append(value.detach())
                    shape.append((name, tuple(value.shape), str(value.dtype), value.device.type))
                elif isinstance(value, (int, float)):
                    self._numbers.append((state, name))
                    shape.append((name, type(value).__name__))
                elif is_of_weight:  # lists, say, as LBFGS has them
                    self.can_be_copied = False
        self.digest = zlib.crc32(repr(shape).encode())
        """The same on two ranks whose states have the same parts."""

    @torch.no_grad()
    def copy_from(self, source: int, host_group: Any) -> None:
        """As it is on the rank ``source``, which must be told the same; takes no memory of a device.

        Args:
            host_group: sends what lies on the host.
        """
        for each in self._tensors:
            dist.broadcast(each, source, group=host_group if each.device.type == "cpu" else None)
        numbers = torch.tensor([float(state[name]) for state, name in self._numbers], dtype=torch.float64)
        if len(numbers):
            dist.broadcast(numbers, source, group=host_group)
        for (state, name), value in zip(self._numbers, numbers.tolist(), strict=True):
            state[name] = type(state[name])(value)
