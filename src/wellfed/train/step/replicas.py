"""Communicates in a step with the other processes that train the same model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wellfed.errors import ModelError

_NO_CONTEXT = nullcontext()


class Ranks:
    """A process that trains alone, and the base class of several ranks. All ranks must call every method."""

    size, number = 1, 0

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any]:
        """Returns a context for the forward and backward pass of one micro-batch."""
        return _NO_CONTEXT

    def forward(self, loss: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Returns ``loss(*arguments)``, called through the model's wrapper if it has one."""
        return loss(*arguments)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss; averages them over the ranks in the last micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]

    def total(self, weight: float) -> float:
        """Returns the sum over all ranks."""
        return weight

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        return flag


class Replicas(Ranks):
    """Ranks that each have the whole model. DDP averages gradients during the last backward pass."""

    def __init__(self, wrapper: nn.Module) -> None:
        """``wrapper`` is DDP; the forward of its module calls the first argument with the others."""
        self._wrapper: Any = wrapper
        self._frozen = [(name, weight) for name, weight in wrapper.named_parameters() if not weight.requires_grad]
        self.size, self.number = dist.get_world_size(), dist.get_rank()
        # Gloo works on the host, so an exchange does not wait for the device.
        self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any]:
        """Returns a context in which DDP sums gradients in the last micro-batch only.

        Raises:
            ModelError: a weight was unfrozen since training began. DDP would not average its gradients.
        """
        for name, weight in self._frozen:
            if weight.requires_grad:
                problem = f"{name.removeprefix('module.model.')} was unfrozen during training on {self.size} ranks"
                way_out = "Unfreeze it in the model's constructor, or train on one device (trainer.devices=1)."
                raise ModelError(f"{problem}, and would differ between them. {way_out}")
        return _NO_CONTEXT if number == num_parts - 1 else self._wrapper.no_sync()

    def forward(self, loss: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Returns ``loss(*arguments)``, called through DDP."""
        return self._wrapper(loss, *arguments)  # type: ignore[no-any-return]

    def total(self, weight: float) -> float:
        """Returns the sum over all ranks."""
        return self._reduced(weight, dist.ReduceOp.SUM)

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        return bool(self._reduced(float(flag), dist.ReduceOp.MAX))

    def _reduced(self, value: float, operation: Any) -> float:
        message = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(message, operation, group=self._group)
        return float(message)
