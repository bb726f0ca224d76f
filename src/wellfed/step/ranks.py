"""Does what a step does together with the other processes that train the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ClipByNorm:
    """`torch.nn.utils.clip_grad_norm_` for what an optimizer trains, bit for bit; does not wait for the device.

    torch sorts the gradients by device and type twice a call, in Python, and each of its three functions enters a mode.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self._optimizer, self._max_norm = optimizer, max_norm
        kinds = {(type(one), one.device, one.dtype) for group in optimizer.param_groups for one in group["params"]}
        self.is_of_one_kind = len(kinds) == 1 and next(iter(kinds))[0] is nn.Parameter

    @torch.no_grad()
    def __call__(self) -> None:
        """Limit the norm of the gradients."""
        groups = self._optimizer.param_groups
        gradients = [one.grad for group in groups for one in group["params"] if one.grad is not None]
        if self.is_of_one_kind and gradients:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_mul_(gradients, norm.add_(1e-6).reciprocal_().mul_(self._max_norm).clamp_(max=1.0))
        elif gradients:
            nn.utils.clip_grad_norm_([one for group in groups for one in group["params"]], self._max_norm)


BUCKET_BYTES = 25 * 2**20
"""Gradients that are summed in one call; as DDP's ``bucket_cap_mb``."""
_NOTHING = nullcontext()


class Ranks:
    """A process that trains alone, and what the classes below do otherwise. All ranks must call every method."""

    size, number = 1, 0
    has_equal_parts = False
    """Each micro-batch is a collective: all ranks must do equally many."""
    retries_together = False
    """A step that fails on one rank can be done again by all."""

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any]:
        """Forward and backward pass of one micro-batch are done within it."""
        return _NOTHING

    def forward(self, loss: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """``loss(*arguments)``, by way of what stands around the model."""
        return loss(*arguments)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def average_gradients(self) -> None:
        """Called when the passes of a step are done."""

    def total(self, weight: float) -> float:
        """The sum over all ranks."""
        return weight

    def any(self, is_so: bool) -> bool:
        """Whether it is so on one of them."""
        return is_so

    def clipping(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Callable[[], Any]:
        """Limits the norm of all gradients."""
        return ClipByNorm(optimizer, max_norm)


class _Wrapped(Ranks):
    def __init__(self, wrapper: nn.Module, device: torch.device) -> None:
        """``wrapper`` is DDP or FSDP, around a module whose forward calls its first argument with the others."""
        self._wrapper: Any = wrapper
        self._device = device
        self.size, self.number = dist.get_world_size(), dist.get_rank()

    def forward(self, loss: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return self._wrapper(loss, *arguments)  # type: ignore[no-any-return]

    def total(self, weight: float) -> float:
        return self._reduced(weight, dist.ReduceOp.SUM)

    def any(self, is_so: bool) -> bool:
        return bool(self._reduced(float(is_so), dist.ReduceOp.MAX))

    def _reduced(self, value: float, operation: Any) -> float:
        told = torch.tensor(value, device=self._device)
        dist.all_reduce(told, operation)
        return float(told)


class Shards(_Wrapped):
    """Each rank holds a part of the model (FSDP); the whole of a block is gathered where it is computed."""

    has_equal_parts = True

    def clipping(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Callable[[], Any]:
        """Goes by the norm over all shards."""
        return partial(self._wrapper.clip_grad_norm_, max_norm)


class Replicas(_Wrapped):
    """Each rank has the whole model (DDP), which sums gradients while the last backward pass runs."""

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any]:
        """The last one's sums are all ranks'."""
        return _NOTHING if number == num_parts - 1 else self._wrapper.no_sync()


class RetryingReplicas(Replicas):
    """Ranks that can do a step again together, when memory runs out on one of them.

    With DDP a rank that fails in the middle of its sums leaves the others waiting. Here each rank computes its
    gradients alone, all tell one another whether that went well, and then the gradients are averaged. The price is that
    no sum is hidden behind the backward pass.
    """

    retries_together = True

    def __init__(self, wrapper: nn.Module, device: torch.device, weights: Sequence[nn.Parameter]) -> None:
        """``weights`` are those that are trained, the same on all ranks, in the same order."""
        super().__init__(wrapper, device)
        self._weights = list(weights)
        # On the host: to agree must not make it wait for the device.
        self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any]:
        """No rank waits for another one within it, but at the first for rank 0's buffers."""
        if number == 0:
            self._wrapper.require_forward_param_sync = True
        return self._wrapper.no_sync()  # type: ignore[no-any-return]

    def any(self, is_so: bool) -> bool:
        """Does not wait for the device."""
        return bool(self._any([is_so])[0])

    @torch.no_grad()
    def average_gradients(self) -> None:
        """The mean over all ranks in place of each one's gradients, as DDP has it; waits for no device.

        A weight that only some ranks have a gradient for counts as zero on the others.
        """
        has_gradient = self._any([weight.grad is not None for weight in self._weights])
        used = [weight for weight, is_used in zip(self._weights, has_gradient, strict=True) if is_used]
        for weight in used:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        for bucket in _buckets([weight.grad for weight in used if weight.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            flat /= self.size
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])

    def _any(self, flags: list[bool]) -> list[int]:
        """Each flag's maximum over all ranks."""
        told = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        return told.tolist()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Successive gradients of one type, up to `BUCKET_BYTES` where a single one is not more."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        is_full = sum(each.nbytes for each in bucket) + gradient.nbytes > BUCKET_BYTES
        if bucket and (is_full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
