"""Communicates in a step with the other processes that train the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wellfed.errors import ModelError
from wellfed.ranks import BUCKET_BYTES
from wellfed.train.step.gradients import GradientAverage, as_zeros, clip_by_norm

Told = TypeVar("Told")


class Ranks:
    """A process that trains alone, and the base class of several ranks. All ranks must call every method."""

    size, number = 1, 0
    has_equal_parts = False
    """Whether each micro-batch is a collective, so that all ranks need equally many."""
    ends_together = False
    """Whether all ranks end a step when memory runs out on one of them (`AgreeingReplicas`)."""
    bucket_bytes = 0
    """Bytes of device memory for sums of gradients."""

    def begin_step(self) -> None:
        """Prepares a step."""

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any] | None:
        """Returns a context for the forward and backward pass of one micro-batch; None if none is needed."""
        return None

    def forward(self, loss: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Returns ``loss(*arguments)``, called through the model's wrapper if it has one."""
        return loss(*arguments)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def without_gradients(self, weights: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Returns a context in which backward passes give all weights gradients of zero, even instead of NaN."""
        return as_zeros(weights)

    def prepare_average(self) -> None:
        """Allocates memory for `average_gradients`; called after a step's passes."""

    def average_gradients(self) -> None:
        """Averages gradients over all ranks; called when all have made their passes."""

    def total(self, weight: float) -> float:
        """Returns the sum over all ranks."""
        return weight

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        return flag

    def agree(self, *, failed: bool) -> None:
        """Raises a StepFailed if ``failed`` is set on any rank. Called after the passes, and after the optimizer."""

    def gather(self, own: Told) -> list[Told]:
        """Returns the objects of all ranks, in the order of ranks."""
        return [own]

    def clipping(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Callable[[], Any]:
        """Returns a function that limits the norm of all gradients."""
        return partial(clip_by_norm, optimizer, max_norm)


class _Wrapped(Ranks):
    def __init__(self, wrapper: nn.Module, device: torch.device) -> None:
        """``wrapper`` is DDP or FSDP; the forward of its module calls the first argument with the others."""
        self._wrapper: Any = wrapper
        self._device = device
        self.size, self.number = dist.get_world_size(), dist.get_rank()

    def forward(self, loss: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return self._wrapper(loss, *arguments)  # type: ignore[no-any-return]

    def total(self, weight: float) -> float:
        return self._reduced(weight, dist.ReduceOp.SUM)

    def any(self, flag: bool) -> bool:
        return bool(self._reduced(float(flag), dist.ReduceOp.MAX))

    def _reduced(self, value: float, operation: Any) -> float:
        message = torch.tensor(value, device=self._device)
        dist.all_reduce(message, operation)
        return float(message)


class Shards(_Wrapped):
    """Ranks that each hold a shard of the model (FSDP). A block is gathered when it is computed."""

    has_equal_parts = True

    def without_gradients(self, weights: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Returns a context that zeroes the gradients of the gathered shards, which FSDP sums."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        handles = [module._handle for module in self._wrapper.modules() if isinstance(module, FullyShardedDataParallel)]
        return as_zeros([handle.flat_param for handle in handles if handle is not None])

    def clipping(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Callable[[], Any]:
        """Returns a function that limits the norm over all shards."""
        return partial(self._wrapper.clip_grad_norm_, max_norm)


class Replicas(_Wrapped):
    """Ranks that each have the whole model. DDP sums gradients during the last backward pass."""

    def __init__(self, wrapper: nn.Module, device: torch.device) -> None:
        super().__init__(wrapper, device)
        self.bucket_bytes = sum(weight.nbytes for weight in wrapper.parameters() if weight.requires_grad)
        self._frozen = [(name, weight) for name, weight in wrapper.named_parameters() if not weight.requires_grad]

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any] | None:
        """Returns a context in which DDP sums gradients in the last micro-batch only."""
        return None if number == num_parts - 1 else self._wrapper.no_sync()

    def prepare_average(self) -> None:
        """Raises a ModelError if a weight was unfrozen since, whose gradients no rank sends to the others."""
        for name, weight in self._frozen:
            if weight.requires_grad and weight.grad is not None:
                raise ModelError(
                    f"{name.removeprefix('module.model.')} was unfrozen after training began on {self.size} ranks, "
                    "which average the gradients of the weights that were trainable then. It would differ between "
                    "ranks. Unfreeze it in the model's constructor, or train on one device (trainer.devices=1)."
                )


class StepFailed(Exception):
    """Error on all ranks if memory ran out on at least one of them."""


class AgreeingReplicas(Replicas):
    """Ranks that end a step together when memory runs out on one of them.

    With DDP's own sums, the others would wait for a failed rank forever. Here each rank computes its gradients alone.
    All agree that they succeeded, and then average the gradients. No sum overlaps with a backward pass.

    All memory for collectives is allocated before the ranks agree, copies of buffers that are not contiguous included.
    All messages have one form, so a failed rank can take part in any exchange.
    """

    ends_together = True

    def __init__(self, wrapper: nn.Module, device: torch.device, weights: Sequence[nn.Parameter]) -> None:
        """``weights``: the trained ones; must be the same on all ranks, in the same order."""
        super().__init__(wrapper, device)
        self._average = GradientAverage(weights, self.size)
        self.bucket_bytes += min(self.bucket_bytes, BUCKET_BYTES)
        self._has_gradient = self._no_gradient = [False] * len(weights)
        self._is_used = self._no_gradient
        self._wrapper.require_forward_param_sync = False  # `begin_step` sends rank 0's buffers
        is_shared = self._wrapper.broadcast_buffers
        self._buffers = [module._buffers for module in wrapper.modules() if module._buffers and is_shared]
        # Gloo works on the host, so an agreement does not wait for the device.
        self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def begin_step(self) -> None:
        """Copies the buffers of rank 0 to all ranks, as DDP does."""
        for buffer in [one for each in self._buffers for one in each.values() if one is not None]:
            sent = buffer.contiguous()  # nearly all are
            dist.broadcast(sent, 0)
            if sent is not buffer:
                buffer.copy_(sent)

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any] | None:
        """Returns a context in which no rank waits for another."""
        return self._wrapper.no_sync()  # type: ignore[no-any-return]

    def prepare_average(self) -> None:
        """Allocates the memory for sums once, and zeros for missing gradients in each step."""
        super().prepare_average()
        self._has_gradient = self._average.prepare()

    def average_gradients(self) -> None:
        """Averages gradients over all ranks; does not wait for the device."""
        self._average(self._is_used)

    def total(self, weight: float) -> float:
        """Returns the sum over all ranks.

        Raises:
            StepFailed: a rank has failed before this exchange.
        """
        return self._exchange(total=weight)[1]

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank; does not wait for the device."""
        return self._exchange(flag=flag)[0]

    def agree(self, *, failed: bool) -> None:
        """See `Ranks.agree`."""
        has_gradient, self._has_gradient = self._has_gradient, self._no_gradient
        self._is_used = self._exchange(failed, has_gradient=has_gradient)[2]

    def gather(self, own: Told) -> list[Told]:
        """Returns the objects of all ranks; needs no device memory."""
        given: list[Any] = [None] * self.size
        dist.all_gather_object(given, own, group=self._group)
        return given

    def _exchange(
        self,
        failed: bool = False,
        flag: bool = False,
        total: float = 0.0,
        has_gradient: Sequence[bool] | None = None,
    ) -> tuple[bool, float, list[bool]]:
        """Returns over all ranks: any flag, the sum of totals, and whether any has a gradient, for each weight."""
        own = [failed, flag, total, *(has_gradient or self._no_gradient)]
        message = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(message, group=self._group)
        num_failed, num_flags, total, *num_gradients = message.tolist()
        if num_failed:
            raise StepFailed("memory ran out on at least one rank")
        return num_flags > 0, total, [number > 0 for number in num_gradients]
