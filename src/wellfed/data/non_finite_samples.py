"""Rebuilds batches that training used, and finds samples with NaN or infinite values in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

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
    builder: BatchBuilder, requests: Sequence[BatchRequest], *, is_usual_allowed: bool
) -> NonFiniteSample | None:
    """Returns the first sample of these batches with such a value; None if none is found within `_MOST_S`.

    Args:
        is_usual_allowed: whether earlier batches trained well; if most batches hold such values, None is returned.
    """
    until_s, bad = time.monotonic() + _MOST_S, list[BatchRequest]()
    for request in requests:
        if time.monotonic() > until_s or (bad and not is_usual_allowed):
            break
        if _value(builder(request).batch) is not None:
            bad.append(request)
    if not bad or (is_usual_allowed and len(bad) > max(1, len(requests) // 2)):
        return None
    for index in bad[0].indices.tolist():
        if (value := _value(builder(bad[0].only(index)).batch)) is not None:
            return NonFiniteSample(index, bad[0].epoch, bad[0].batch, value)
    return None


def _value(batch: Batch) -> str | None:
    """Returns the kind of non-finite value in a batch, or None."""
    for tensor in batches.tensors(batch):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return "NaN" if bool(tensor.isnan().any()) else "an infinite value"
    return None
