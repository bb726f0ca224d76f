"""Says what is done about a loss that is no finite number."""

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
    """Returns in words which step of these a message is about; losses are read only now and then."""
    return f"in step {last}" if first >= last else f"within the steps {first} to {last}"


class NonFiniteLoss(ArithmeticError):
    """The loss is not a finite number, and trainer.on_nan=raise."""


_FACTOR = "wellfed_lr_factor"
"""Key of a parameter group, and so of a checkpoint: what `halve_rate` has left of the scheduled learning rate."""


def rate_factor(group: Mapping[str, Any]) -> float:
    """Returns what the scheduled learning rate of a parameter group is multiplied by: 1, 0.5, 0.25 and so on."""
    return float(group.get(_FACTOR, 1.0))


def halve_rate(optimizer: torch.optim.Optimizer) -> bool:
    """Halves the learning rate from here on, whatever a scheduler sets later (`as_scheduled`).

    Returns:
        False where the optimizer has no learning rate.
    """
    groups = [group for group in optimizer.param_groups if group.get("lr") is not None]
    for group in groups:
        group["lr"] /= 2
        group[_FACTOR] = rate_factor(group) / 2
    return bool(groups)


@contextmanager
def as_scheduled(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Shows a scheduler the rates that it has set itself, and applies the factor to those that it sets within.

    The factor is a power of two, so it is taken off and put back without a rounding error.
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
    """Returns a flag on the device; waits for nothing."""
    dense = [value._values() if value.is_sparse else value for value in values]
    found = [value for value in dense if value.numel()]
    return torch.isfinite(get_total_norm(found, math.inf)) if found else torch.tensor(True)
