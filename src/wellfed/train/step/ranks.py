"""Does what a step does together with the other processes that train the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wellfed.train.step.copied_step import SteppedState
from wellfed.train.step.gradient_average import GradientAverage
from wellfed.train.step.gradient_buckets import BUCKET_BYTES


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
        has_sparse = any(gradient.is_sparse for gradient in gradients)
        if has_sparse:
            gradients = [_entries(one) for group in groups for one in group["params"] if one.grad is not None]
        if self.is_of_one_kind and gradients:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_mul_(gradients, norm.add_(1e-6).reciprocal_().mul_(self._max_norm).clamp_(max=1.0))
        elif has_sparse:
            norm = nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient.mul_((self._max_norm / (norm.to(gradient.device) + 1e-6)).clamp(max=1.0))
        elif gradients:
            nn.utils.clip_grad_norm_([one for group in groups for one in group["params"]], self._max_norm)


def _entries(weight: Tensor) -> Tensor:
    """Returns the numbers of a gradient, to be changed in place. A sparse one first gets each index once."""
    assert weight.grad is not None
    if not weight.grad.is_sparse:
        return weight.grad
    weight.grad = weight.grad.coalesce()
    return weight.grad._values()


_NOTHING = nullcontext()


@contextmanager
def _zeros_for(weights: Sequence[Tensor]) -> Iterator[None]:
    hooks = [one.register_hook(torch.zeros_like) for one in weights if one.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Ranks:
    """A process that trains alone, and what the classes below do otherwise. All ranks must call every method."""

    size, number = 1, 0
    has_equal_parts = False
    """Each micro-batch is a collective: all ranks must do equally many."""
    lacks_gradients = False
    """One of the ranks has no gradient of a weight that another one has a gradient of."""

    def begin_step(self) -> None:
        """Called before a step, and not again where it is done again."""

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any]:
        """Forward and backward pass of one micro-batch are done within it."""
        return _NOTHING

    def forward(self, loss: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """``loss(*arguments)``, by way of what stands around the model."""
        return loss(*arguments)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def without_gradients(self, weights: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Within it a backward pass gives all weights gradients of zero, also where it computes NaN."""
        return _zeros_for(weights)

    def make_room(self) -> None:
        """Take the memory that `average_gradients` needs; called when the passes of a step are done."""

    def average_gradients(self) -> None:
        """Called when all ranks have done that."""

    def total(self, weight: float) -> float:
        """The sum over all ranks."""
        return weight

    def any(self, is_so: bool) -> bool:
        """Whether it is so on one of them."""
        return is_so

    bucket_bytes = 0
    """What it takes of a device to sum gradients."""

    def agree(self, has_failed: bool, is_so: bool, *, in_optimizer: bool = False) -> tuple[bool, bool]:
        """Whether an attempt has failed on one of the ranks that do it again together, and whether something else is so
        on one of them; to be called when each has ended its attempt.

        Args:
            in_optimizer: the attempt is the optimizer's step, within which passes are attempts of their own.
        """
        return has_failed, is_so

    def fill_gradients(self) -> None:
        """Zeros in place of those that `lacks_gradients` tells of; an attempt that is to be agreed on."""

    def take_step_of_another(self, optimizer: torch.optim.Optimizer, more: Sequence[Tensor], has_stepped: bool) -> bool:
        """Where some ranks have taken the optimizer's step, let the others have what came of it; False where none has,
        or where their states have other parts.

        Args:
            more: what else the step has changed.
        """
        return False

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

    def without_gradients(self, weights: Sequence[Tensor]) -> AbstractContextManager[None]:
        """As for `Ranks`; of what is gathered of the shards, where the passes leave the gradients that are summed."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        handles = [module._handle for module in self._wrapper.modules() if isinstance(module, FullyShardedDataParallel)]
        return _zeros_for([handle.flat_param for handle in handles if handle is not None])

    def clipping(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Callable[[], Any]:
        """Goes by the norm over all shards."""
        return partial(self._wrapper.clip_grad_norm_, max_norm)


class Replicas(_Wrapped):
    """Each rank has the whole model (DDP), which sums gradients while the last backward pass runs."""

    def __init__(self, wrapper: nn.Module, device: torch.device) -> None:
        super().__init__(wrapper, device)
        self.bucket_bytes = sum(weight.nbytes for weight in wrapper.parameters() if weight.requires_grad)

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any]:
        """The last one's sums are all ranks'."""
        return _NOTHING if number == num_parts - 1 else self._wrapper.no_sync()


class OtherRankFailed(Exception):
    """Another rank ran out of memory before it came as far as this one.

    Args:
        in_optimizer: not in the passes, but in the optimizer's step around them: that is over for this rank, too.
    """

    def __init__(self, *, in_optimizer: bool) -> None:
        super().__init__("another rank ran out of memory")
        self.in_optimizer = in_optimizer


class RetryingReplicas(Replicas):
    """Ranks that can do a step again together, when memory runs out on one of them.

    With DDP a rank that fails in the middle of its sums leaves the others waiting. Here each rank computes its
    gradients alone, all tell one another whether that went well, and then the gradients are averaged. The price is that
    no sum is hidden behind the backward pass.

    What ranks do together takes no memory of a device: all of it is taken before, where to fail is to tell the others.
    (A buffer that is not contiguous is copied to be sent.)
    All messages between ranks have one form, so that a rank which has failed can answer whatever the others ask.
    """

    def __init__(self, wrapper: nn.Module, device: torch.device, weights: Sequence[nn.Parameter]) -> None:
        """``weights`` are those that are trained, the same on all ranks, in the same order."""
        super().__init__(wrapper, device)
        self._weights = list(weights)
        self._average = GradientAverage(self._weights, self.size)
        self.bucket_bytes += min(self.bucket_bytes, BUCKET_BYTES)
        self._is_used = [False] * len(self._weights)
        self._wrapper.require_forward_param_sync = False  # rank 0's buffers come by `begin_step`
        is_shared = self._wrapper.broadcast_buffers
        self._buffers = [module._buffers for module in wrapper.modules() if module._buffers and is_shared]
        # On the host: to agree must not make it wait for the device.
        self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def begin_step(self) -> None:
        """Each rank's buffers become rank 0's, as with DDP."""
        for buffer in [one for each in self._buffers for one in each.values() if one is not None]:
            sent = buffer.contiguous()  # as nearly all are
            dist.broadcast(sent, 0)
            if sent is not buffer:
                buffer.copy_(sent)

    def micro_batch(self, number: int, num_parts: int) -> AbstractContextManager[Any]:
        """No rank waits for another one within it."""
        return self._wrapper.no_sync()  # type: ignore[no-any-return]

    def total(self, weight: float) -> float:
        """The sum over all ranks.

        Raises:
            OtherRankFailed: one of them has failed instead of asking for it.
        """
        in_passes, in_optimizer, _, total, *_ = self._exchange(total=weight)
        if in_passes or in_optimizer:
            raise OtherRankFailed(in_optimizer=in_optimizer > 0)
        return total

    def any(self, is_so: bool) -> bool:
        """Does not wait for the device."""
        return bool(self._exchange(is_so=is_so)[2])

    def agree(self, has_failed: bool, is_so: bool, *, in_optimizer: bool = False) -> tuple[bool, bool]:
        """As for `Ranks.agree`.

        Raises:
            OtherRankFailed: in the optimizer's step, while this rank is in the passes within it.
        """
        flags = (False, has_failed) if in_optimizer else (has_failed, False)
        failed, failed_in_optimizer, so, _, *gradients = self._exchange(*flags, is_so, gradients=True)
        if failed_in_optimizer and not in_optimizer:
            raise OtherRankFailed(in_optimizer=True)
        failed += failed_in_optimizer
        self._is_used = [number > 0 for number in gradients]
        self.lacks_gradients = any(0 < number < self.size for number in gradients)
        return bool(failed), bool(so)

    def make_room(self) -> None:
        """That in which gradients are summed, once for all steps."""
        self._average.make_room()

    def fill_gradients(self) -> None:
        """On this rank, where it lacks them."""
        self._average.fill(self._is_used)

    def average_gradients(self) -> None:
        """The mean over all ranks in place of each one's gradients, as DDP has it; waits for no device.

        A weight that only some ranks have a gradient for counts as zero on the others.
        """
        self._average(self._is_used)

    def take_step_of_another(self, optimizer: torch.optim.Optimizer, more: Sequence[Tensor], has_stepped: bool) -> bool:
        """From the first rank that has taken it; takes no memory of the device."""
        state = SteppedState(optimizer, more)
        source = self.number if has_stepped else self.size
        # The first rank that has stepped, and the least and the greatest digest.
        least = torch.tensor([source, int(state.can_be_copied), state.digest, -state.digest])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        source, can_be_copied, digest, negated = least.tolist()
        if source == self.size or not can_be_copied or digest != -negated:
            return False
        state.copy_from(source, self._group)
        return True

    def _exchange(
        self,
        failed: bool = False,
        failed_in_optimizer: bool = False,
        is_so: bool = False,
        total: float = 0.0,
        *,
        gradients: bool = False,
    ) -> list[float]:
        """The sums over all ranks: of the flags, the total, and for each weight of the ranks that have a gradient."""
        has_gradient = [gradients and weight.grad is not None for weight in self._weights]
        message = torch.tensor([failed, failed_in_optimizer, is_so, total, *has_gradient], dtype=torch.float64)
        dist.all_reduce(message, group=self._group)
        return message.tolist()
