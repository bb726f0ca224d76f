"""Callbacks of a plain model: early stopping, averaged weights, and learning rates.

They take the usual arguments of Lightning's callbacks with the same purpose (`configs/callbacks`). With any other
argument or callback, Lightning trains the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn


class Callback:
    """Base of the callbacks. `Training` calls the methods in the order in which they are here; each may do nothing."""

    ended_by: str | None = None
    """Reason of an end of training, read after each `looked` and after a resume; None = it goes on."""
    monitor: str | None = None
    """Metric that `looked` needs; None = none."""

    def begin(self, whole: nn.Module) -> None:
        """Called before the first step, when the model is on its device. Its names are those of checkpoints."""

    def stepped(self, step: int) -> None:
        """Called after each optimizer step."""

    def figures(self, optimizer: torch.optim.Optimizer) -> Mapping[str, float]:
        """Returns metrics for a row of training."""
        return {}

    def looked(self, metrics: Mapping[str, float]) -> None:
        """Called with the latest metrics after each epoch, or after each validation that comes by steps."""

    def end(self) -> None:
        """Called after training, when the last checkpoint is written."""

    def state_dict(self) -> dict[str, Any]:
        """Returns values for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` has returned."""


class EarlyStopping(Callback):
    """End of training when ``monitor`` has not improved by ``min_delta`` for ``patience`` validations, or is NaN."""

    monitor: str

    def __init__(
        self, monitor: str, mode: Literal["min", "max"] = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode} is neither min nor max")
        self.monitor, self._patience, self._min_delta = monitor, patience, abs(min_delta)
        self._sign = -1 if mode == "min" else 1
        """Factor after which higher is better."""
        self._value, self._best, self._waited = 0.0, -self._sign * math.inf, 0

    def looked(self, metrics: Mapping[str, float]) -> None:
        self._value = metrics[self.monitor]
        if self._sign * self._value > self._sign * self._best + self._min_delta:
            self._best, self._waited = self._value, 0
        else:
            self._waited += 1
        self._decide()

    def _decide(self) -> None:
        self.ended_by = None
        if not math.isfinite(self._value):
            self.ended_by = f"{self.monitor} is {self._value}."
        elif self._waited >= max(1, self._patience):
            waited = f"{self.monitor} did not improve in the last {self._waited} validations"
            self.ended_by = f"{waited}. Best: {self._best:.4g}."

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._value, self._best, self._waited = state["value"], state["best"], state["waited"]
        self._decide()


class Ema(Callback):
    """Exponential moving average of weights and buffers, which is validated, kept and tested in place of them.

    ``state_dict`` of a checkpoint is the average; ``current_model_state`` has the weights that training goes on with.
    """

    def __init__(
        self, decay: float = 0.999, update_every_n_steps: int = 1, update_starting_at_step: int | None = None
    ) -> None:
        self._decay, self._every, self._first = decay, update_every_n_steps, update_starting_at_step or 0
        self._whole: nn.Module
        self.averaged: AveragedModel
        """The average is its ``module``, but for the time between two `swap`."""

    def begin(self, whole: nn.Module) -> None:
        self._whole = whole
        device, average = next(whole.parameters()).device, get_ema_avg_fn(self._decay)  # type: ignore[no-untyped-call]
        self.averaged = AveragedModel(whole, device, avg_fn=average, use_buffers=True)

    def stepped(self, step: int) -> None:
        done = step - 1
        if done >= self._first and done % self._every == 0:
            self.averaged.update_parameters(self._whole)

    def swap(self) -> None:
        """Exchanges the model's weights with the average; called before and after a validation."""
        each = [chain(module.parameters(), module.buffers()) for module in (self.averaged.module, self._whole)]
        for average, own in zip(*each, strict=True):
            before = average.data.clone()
            average.data.copy_(own.data)
            own.data.copy_(before)

    def end(self) -> None:
        self.swap()
        del self.averaged

    def state_dict(self) -> dict[str, Any]:
        return {"n_averaged": self.averaged.n_averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averaged.n_averaged.copy_(state["n_averaged"])


class LrMonitor(Callback):
    """Learning rate of each parameter group, in the rows of training."""

    def __init__(self, logging_interval: Literal["step", "epoch"] | None = None) -> None:
        """``logging_interval``: all values log with each row of training."""

    def figures(self, optimizer: torch.optim.Optimizer) -> Mapping[str, float]:
        name, groups = f"lr-{type(optimizer).__name__}", optimizer.param_groups
        if len(groups) == 1:
            return {name: float(groups[0]["lr"])}
        return {f"{name}/pg{number}": float(group["lr"]) for number, group in enumerate(groups, 1)}
