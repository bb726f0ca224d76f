"""Averages gradients over all ranks in memory that is there beforehand: none runs out of it while the others wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wellfed.train.step.gradient_buckets import BUCKET_BYTES, buckets


class GradientAverage:
    """The mean over all ranks in place of each one's gradients, as DDP has it."""

    def __init__(self, weights: Sequence[nn.Parameter], num_ranks: int) -> None:
        """``weights``: the same on all ranks, in the same order."""
        self._weights, self._num_ranks = weights, num_ranks
        self._room: dict[torch.dtype, Tensor] = {}
        """One bucket of each type; a gradient that is a bucket by itself is summed where it lies."""

    def make_room(self) -> None:
        """All memory that a call takes; raises where there is none."""
        for dtype in {weight.dtype for weight in self._weights} - self._room.keys():
            alike = [weight for weight in self._weights if weight.dtype == dtype]
            largest = max((weight.nbytes for weight in alike if not weight.is_contiguous()), default=0)
            num_bytes = max(min(BUCKET_BYTES, sum(weight.nbytes for weight in alike)), largest)
            size = -(-num_bytes // dtype.itemsize)
            self._room[dtype] = torch.empty(size, dtype=dtype, device=alike[0].device)

    def fill(self, is_used: Sequence[bool]) -> None:
        """Zeros where this rank has no gradient and another one has; raises where there is no room for them."""
        for weight, is_needed in zip(self._weights, is_used, strict=True):
            if is_needed and weight.grad is None:
                weight.grad = torch.zeros_like(weight)

    @torch.no_grad()
    def __call__(self, is_used: Sequence[bool]) -> None:
        """Average; all ranks must call it with the same, which each of them has gradients for. Waits for no device."""
        used = [weight.grad for weight, is_needed in zip(self._weights, is_used, strict=True) if is_needed]
        for bucket in buckets([gradient for gradient in used if gradient is not None]):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                dist.all_reduce(bucket[0])
                bucket[0].div_(self._num_ranks)
                continue
            sizes = [gradient.numel() for gradient in bucket]
            flat = self._room[bucket[0].dtype][: sum(sizes)]
            parts = [part.view(each.shape) for part, each in zip(torch.split(flat, sizes), bucket, strict=True)]
            torch._foreach_copy_(parts, bucket)
            dist.all_reduce(flat)
            flat.div_(self._num_ranks)
            torch._foreach_copy_(bucket, parts)
