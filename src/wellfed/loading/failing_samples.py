"""Finds the samples that make a batch fail, by asking for smaller and smaller parts of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from wellfed.loading.batch_request import BatchRequest

_LOG = logging.getLogger(__name__)
Failure = TypeVar("Failure")


class NoSampleAtFaultError(Exception):
    """A part of the batch fails and neither of its halves does: it fails as a whole, or now and then."""


def failing_samples(
    indices: Tensor, failure: Failure, ask: Callable[[Tensor], Failure | None], *, most: int
) -> list[tuple[int, Failure]]:
    """The first ``most`` indices that fail, in the order of ``indices``, each with its failure.

    One bad index among n costs about log2(n) questions.

    Args:
        failure: that of all of them together.
        ask: what a part fails with; None = it does not.

    Raises:
        NoSampleAtFaultError: a part fails and neither of its halves does.
    """
    if len(indices) == 1:
        return [(int(indices[0]), failure)]
    middle = len(indices) // 2
    found: list[tuple[int, Failure]] = []
    for half in (indices[:middle], indices[middle:]):
        if len(found) < most and (of_half := ask(half)) is not None:
            found += failing_samples(half, of_half, ask, most=most - len(found))
    if not found:
        raise NoSampleAtFaultError
    return found


def first_failing_sample(
    request: BatchRequest, purpose: str, failure: Failure, ask: Callable[[BatchRequest], Failure | None]
) -> int:
    """The first index at which a worker hangs, or dies, where the data was asked for a whole batch at once.

    Raises:
        NoSampleAtFaultError: every sample can be had alone.
    """
    _LOG.warning(
        "%s batch %d of epoch %d never came: looking for the one of its %d samples that is at fault.",
        purpose.capitalize(), request.batch, request.epoch, len(request.indices),
    )  # fmt: skip
    return failing_samples(request.indices, failure, lambda part: ask(request.only(part)), most=1)[0][0]
