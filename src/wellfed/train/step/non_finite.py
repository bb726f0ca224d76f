"""Handles a loss that is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

OnNan = Literal["raise", "skip"]
USUAL_CAUSES = (
    "Usual causes: the learning rate (workload.optimizer.lr), no warm-up (workload.schedule.warmup_steps), no clipping "
    "(trainer.gradient_clip=1.0)."
)


class NonFiniteLoss(ArithmeticError):
    """Error for a loss that is not finite, with trainer.on_nan=raise."""


def between(first: int, last: int) -> str:
    """Returns text for a range of steps, since losses are not read after each."""
    return f"in step {last}" if first >= last else f"within the steps {first} to {last}"


def all_finite(values: Iterable[Tensor]) -> Tensor:
    """Returns whether all values are finite, as a tensor on their device; does not wait for it."""
    dense = [value._values() if value.is_sparse else value for value in values]
    found = [value for value in dense if value.numel()]
    return torch.isfinite(get_total_norm(found, math.inf)) if found else torch.tensor(True)
