"""What DDP does for a step, done by hand, so that ranks can do a step again together when memory runs out on one.

DDP sums gradients while the last backward pass runs: a rank that fails in the middle of it leaves the others waiting.
Here each rank computes its gradients alone (under DDP's ``no_sync``), all tell one another whether that went well, and
then the gradients are averaged. The price is that no sum is hidden behind the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
"""Gradients that are summed in one call; as DDP's ``bucket_cap_mb``."""


class RanksOfStep:
    """The ranks of a data-parallel training; every method must be called by all of them."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        """
        Args:
            weights: those that are trained, the same on all ranks, in the same order.
        """
        self._weights, self._world_size = list(weights), dist.get_world_size()
        # On the host: to agree must not make it wait for the device.
        is_on_host = dist.get_backend() == "gloo"
        self._group = dist.group.WORLD if is_on_host else dist.new_group(backend="gloo")

    def any_failed(self, failed: bool) -> bool:
        """Whether one of them has failed."""
        flag = torch.tensor([failed], dtype=torch.uint8)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """The mean over all ranks in place of each one's gradients, as DDP has it; waits for no device.

        A weight that only some ranks have a gradient for counts as zero on the others.
        """
        has_gradient = torch.tensor([weight.grad is not None for weight in self._weights], dtype=torch.uint8)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self._group)
        used = [weight for weight, is_used in zip(self._weights, has_gradient.tolist(), strict=True) if is_used]
        for weight in used:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        for bucket in _buckets([weight.grad for weight in used if weight.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            flat /= self._world_size
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])


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
