"""Groups gradients that ranks sum in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # a plan counts with buckets, and does without torch

BUCKET_BYTES = 25 * 2**20
"""As DDP's ``bucket_cap_mb``."""


def buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Successive gradients of one type, up to `BUCKET_BYTES` where a single one is not more."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for gradient in gradients:
        num_bytes += gradient.nbytes
        if bucket and (num_bytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, num_bytes = [], gradient.nbytes
        bucket.append(gradient)
    if bucket:
        yield bucket
