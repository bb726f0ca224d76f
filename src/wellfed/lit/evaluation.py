"""Evaluations that ranks share: each evaluates some of the batches, and all have the result of all."""

from __future__ import annotations

from typing import Any

import torch

from wellfed import batches
from wellfed.contract import Evaluation
from wellfed.errors import DataError

SHARING_STRATEGIES = ("auto", "ddp")
"""Where a rank can evaluate a batch by itself: each has the whole model."""


def can_be_shared(evaluation: Evaluation) -> bool:
    """Whether it says how what several ranks have taken in goes together."""
    return callable(getattr(evaluation, "state", None)) and callable(getattr(evaluation, "merge", None))


def merge_over_ranks(evaluation: Any, failure: Exception | None = None) -> None:
    """Give the evaluation of each rank what those of all have taken in. Waits for the other ranks, and the device.

    Args:
        failure: why this rank has not evaluated all that it should have.

    Raises:
        Exception: ``failure``; on the other ranks an error of data that says the same.
    """
    told = None if failure is None else str(failure) or type(failure).__name__
    # Tensors would arrive on the device that they were sent from, which is another rank's.
    state = batches.map_tensors(evaluation.state(), lambda tensor: tensor.cpu())
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (told, state))
    if failure is not None:
        raise failure
    for told, _ in ranks:
        if told is not None:
            raise DataError(told)
    evaluation.merge([state for _, state in ranks])
