"""Rebuilds batches that training used, and finds samples with NaN or infinite values in them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from wellfed import batches
from wellfed.contract import Batch
from wellfed.data.backends.batch_builder import BatchBuilder
from wellfed.data.backends.batch_request import BatchRequest

_MOST_S = 20.0
"""Maximum seconds of a search."""


@dataclass(frozen=True)
class NonFiniteSample:
    """A sample with values that are not finite."""

    sample: int
    """Dataset index."""
    epoch: int
    batch: int
    """Number of the batch in its epoch, from 0."""
    value: str
    """``NaN`` or ``an infinite value``."""


def first_non_finite(
    builder: BatchBuilder, requests: Iterable[BatchRequest], *, is_usual_allowed: bool
) -> NonFiniteSample | None:
    """Returns the first sample of these batches with such a value; None if none is found within `_MOST_S`.

    Args:
        is_usual_allowed: whether earlier batches trained well; if most batches hold such values, None is returned.
    """
    found: NonFiniteSample | None = None
    num, num_bad, ends_s = 0, 0, time.monotonic() + _MOST_S
    for request in requests:
        if time.monotonic() > ends_s:
            break
        num += 1
        value = _value(builder(request).batch)
        num_bad += value is not None
        if found is None and value is not None:
            found = _sample_of(builder, request)
        if found is not None and not is_usual_allowed:
            break
    return None if is_usual_allowed and num_bad > max(1, num // 2) else found


def _sample_of(builder: BatchBuilder, request: BatchRequest) -> NonFiniteSample | None:
    """Bisects a batch. Returns None if only the whole of it has such values."""
    indices = request.indices
    while len(indices) > 1:
        half, other = indices.tensor_split(2)
        indices = other if _value(builder(request.only(half)).batch) is None else half
    value = _value(builder(request.only(indices)).batch)
    return None if value is None else NonFiniteSample(int(indices), request.epoch, request.batch, value)


def _value(batch: Batch) -> str | None:
    """Returns the kind of non-finite value in a batch, or None."""
    for tensor in batches.tensors(batch):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return "NaN" if bool(torch.isnan(tensor).any()) else "an infinite value"
    return None
