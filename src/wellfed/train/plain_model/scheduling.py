"""Sets the learning rate of each step, by a factor of ours or by a scheduler of torch or the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from wellfed.errors import ConfigError, WellfedError
from wellfed.observe.timing.wall import Wall


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


class Rates:
    """Learning rates of an optimizer: by a factor on the first ones, or by a scheduler, whose time counts to it."""

    monitor: str | None = None
    """Metric that a scheduler follows; None = none."""
    kind = "workload.schedule.name"
    """Setter of the rates: this knob, or the class of a scheduler."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        scheduling: Scheduling | None,
        wall: Wall,
    ) -> None:
        """``factor`` returns the factor by finished steps, unless there is a ``scheduling``."""
        self._optimizer, self._factor, self._done, self._wall = optimizer, factor, -1, wall
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._scheduler: Any = None
        if scheduling is None:
            self.stepped(False)
            return
        config = scheduling.of(optimizer)
        self._scheduler, self._is_by_step = config["scheduler"], config["interval"] == "step"
        self.monitor, self.kind = config["monitor"], type(self._scheduler).__name__

    def stepped(self, is_last: bool) -> None:
        """Sets the rates of the next step; ``is_last``: the epoch is over."""
        if self._scheduler is not None:
            if self.monitor is None and (self._is_by_step or is_last):
                self._step()
            return
        self._done += 1
        factor = self._factor(self._done)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    def follow(self, metrics: Mapping[str, float], is_validated: bool, is_last: bool) -> None:
        """Adapts the rates to `monitor`, after a validation or at the end of an epoch."""
        if self.monitor is None or not (is_validated if self._is_by_step else is_last):
            return
        if self.monitor not in metrics:
            raise nobody_logs("workload.schedule.monitor", self.monitor, metrics)
        self._step(metrics[self.monitor])

    def _step(self, *metric: float) -> None:
        before = self._wall.switch(f"{self.kind}.step")
        try:
            self._scheduler.step(*metric)
        except ValueError as error:  # a cycle ends before training does
            raise WellfedError(f"workload.schedule ({self.kind}): {error}") from error
        finally:
            self._wall.back(before)

    def state_dict(self) -> dict[str, Any]:
        """Returns values for checkpoints."""
        state = {"done": self._done} if self._scheduler is None else self._scheduler.state_dict()
        return {**state, "kind": self.kind}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint, with the schedule of this run. The optimizer's state is loaded already.

        Raises:
            ConfigError: another kind of schedule has set the rates until then.
        """
        if state["kind"] != self.kind:
            problem = f"the rates were set by {state['kind']} until this checkpoint, and now by {self.kind}."
            raise ConfigError.of("workload.schedule", problem, "Set it as in the run that goes on, or begin a new run.")
        if self._scheduler is not None:
            self._scheduler.load_state_dict({name: value for name, value in state.items() if name != "kind"})
        else:
            self._done = int(state["done"]) - 1
            self.stepped(False)


def nobody_logs(where: str, monitor: str, logged: Mapping[str, Any]) -> WellfedError:
    """Returns the error for a monitored metric that does not exist."""
    names = ", ".join(sorted(logged)) or "no figures so far"
    meant = next((name for name in logged if name.replace("/", "_") == monitor.replace("/", "_")), None)
    way_out = f"Set {where}={meant}." if meant else f"There are: {names}."
    return WellfedError(f"{where}={monitor}: no figure is called {monitor}. {way_out}")
