"""Sets the learning rates of the steps: by a factor of ours, or by a scheduler of torch or the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from wellfed.errors import ConfigError, WellfedError
from wellfed.observe.timing.wall import Wall
from wellfed.train.plain_model.scheduling import Scheduling


class Rates:
    """Learning rates of an optimizer."""

    monitor: str | None = None
    """Metric that the rates follow; None = none."""
    kind = "workload.schedule.name"
    """Setter of the rates: this knob, or the class of a scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        """``factor`` returns the factor on the rates by finished steps."""
        self._optimizer, self._factor, self._done = optimizer, factor, -1
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self.stepped(False)

    def stepped(self, is_last: bool) -> None:
        """Sets the rates of the next step; ``is_last``: the epoch is over."""
        self._done += 1
        factor = self._factor(self._done)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    def follow(self, metrics: Mapping[str, float], is_validated: bool, is_last: bool) -> None:
        """Adapts the rates to `monitor`, after a validation or at the end of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Returns values for checkpoints."""
        return {"kind": self.kind, "done": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint, with the schedule of this run. The optimizer's state is loaded already.

        Raises:
            ConfigError: another kind of schedule has set the rates until then.
        """
        if state["kind"] != self.kind:
            problem = f"the rates were set by {state['kind']} until this checkpoint, and now by {self.kind}."
            way_out = "Set workload.schedule as in the run that goes on, or begin a new run."
            raise ConfigError.of("workload.schedule", problem, way_out)
        self._load({name: value for name, value in state.items() if name != "kind"})

    def _load(self, state: dict[str, Any]) -> None:
        self._done = int(state["done"]) - 1
        self.stepped(False)


class ScheduledRates(Rates):
    """Rates by a scheduler of torch or the user. The time of its steps counts to it."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduling: Scheduling, wall: Wall) -> None:
        config = scheduling.of(optimizer)
        self._scheduler, self._is_by_step = config["scheduler"], config["interval"] == "step"
        self.monitor = config["monitor"]
        self.kind, self._wall = type(self._scheduler).__name__, wall

    def stepped(self, is_last: bool) -> None:
        if self.monitor is None and (self._is_by_step or is_last):
            self._step()

    def follow(self, metrics: Mapping[str, float], is_validated: bool, is_last: bool) -> None:
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
        return {**self._scheduler.state_dict(), "kind": self.kind}

    def _load(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)


def nobody_logs(where: str, monitor: str, logged: Mapping[str, Any]) -> WellfedError:
    """Returns the error for a monitored metric that does not exist."""
    names = ", ".join(sorted(logged)) or "no figures so far"
    meant = next((name for name in logged if name.replace("/", "_") == monitor.replace("/", "_")), None)
    way_out = f"Set {where}={meant}." if meant else f"There are: {names}."
    return WellfedError(f"{where}={monitor}: no figure is called {monitor}. {way_out}")
