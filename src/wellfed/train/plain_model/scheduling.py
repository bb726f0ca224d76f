"""Sets the learning rate of each step, by a factor of ours or by a scheduler of torch or the user."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from wellfed.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Factor on the learning rate by step. Can be pickled, unlike a closure."""

    name: Literal["constant", "cosine", "linear"]
    warmup_steps: int
    min_lr_frac: float
    total_steps: int | None

    def __call__(self, step: int) -> float:
        """Returns the factor for the step after ``step`` finished ones."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.name == "constant" or self.total_steps is None:
            return 1.0
        length = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / length)
        left = 1 - done if self.name == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.min_lr_frac + (1 - self.min_lr_frac) * left


@dataclass(frozen=True)
class Scheduling:
    """A scheduler of torch or the user, which replaces `Schedule`."""

    make: Callable[[torch.optim.Optimizer], Any]
    interval: Literal["step", "epoch"] | None
    """None: the usual interval of its class."""
    monitor: str | None

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns Lightning's configuration of the scheduler.

        Raises:
            ConfigError: the scheduler monitors a metric and none is named, or the reverse.
        """
        scheduler = self.make(optimizer)
        is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        if is_plateau != (self.monitor is not None):
            problem = f"{type(scheduler).__name__} {'goes' if is_plateau else 'does not go'} by a figure."
            way_out = f"Set workload.schedule.monitor={'val/loss' if is_plateau else 'null'}."
            raise ConfigError.of(f"workload.schedule.monitor={self.monitor or 'null'}", problem, way_out)
        interval = self.interval or ("step" if isinstance(scheduler, (OneCycleLR, CyclicLR)) else "epoch")
        return {"scheduler": scheduler, "interval": interval, "monitor": self.monitor}
