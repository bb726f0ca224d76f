"""Handles a loss that is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

OnNan = Literal["raise", "skip", "halve_lr"]
USUAL_CAUSES = (
    "Usual causes: the learning rate (workload.optimizer.lr), no warm-up (workload.schedule.warmup_steps), no clipping "
    "(trainer.gradient_clip=1.0)."
)


def between(first: int, last: int) -> str:
    """Returns text for a range of steps, since losses are not read after each."""
    return f"in step {last}" if first >= last else f"within the steps {first} to {last}"


class NonFiniteLoss(ArithmeticError):
    """Error for a loss that is not finite, with trainer.on_nan=raise."""


_FACTOR = "wellfed_lr_factor"
"""Key of a parameter group for the factor that `halve_rate` applies; checkpoints have it too."""


def rate_factor(group: Mapping[str, Any]) -> float:
    """Returns the factor on the scheduled learning rate: 1, 0.5, 0.25 and so on."""
    return float(group.get(_FACTOR, 1.0))


def halve_rate(optimizer: torch.optim.Optimizer) -> bool:
    """Halves the learning rate from now on, also those that a scheduler sets later (`as_scheduled`).

    Returns:
        False if the optimizer has no learning rate.
    """
    groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
    for group in groups:
        group["lr"] /= 2
        group[_FACTOR] = rate_factor(group) / 2
    return bool(groups)


@contextmanager
def as_scheduled(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Shows a scheduler the rates that it has set itself; applies the factor to those that it sets within the context.

    The factor is a power of two, so nothing is rounded.
    """
    halved = [group for group in optimizer.param_groups if _FACTOR in group]
    for group in halved:
        group["lr"] /= group[_FACTOR]
    try:
        yield
    finally:
        for group in halved:
            group["lr"] *= group[_FACTOR]


def all_finite(values: Iterable[Tensor]) -> Tensor:
    """Returns whether all values are finite, as a tensor on their device; does not wait for it."""
    dense = [value._values() if value.is_sparse else value for value in values]
    found = [value for value in dense if value.numel()]
    return torch.isfinite(get_total_norm(found, math.inf)) if found else torch.tensor(True)
