"""Says what is done about a loss that is no finite number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

OnNan = Literal["raise", "skip", "halve_lr"]
USUAL_CAUSES = (
    "Usual causes: the learning rate (workload.optimizer.lr), no warm-up (workload.schedule.warmup_steps), no clipping "
    "(trainer.gradient_clip=1.0)."
)


class NonFiniteLoss(ArithmeticError):
    """The loss is not a finite number, and trainer.on_nan=raise."""


def halve_rate(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any]) -> None:
    """The learning rate is half from here on, and half of what the optimizer's schedulers say later."""
    for scheduler in schedulers:
        if scheduler.optimizer is optimizer and hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate / 2 for rate in scheduler.base_lrs]
    for group in optimizer.param_groups:
        group["lr"] /= 2
