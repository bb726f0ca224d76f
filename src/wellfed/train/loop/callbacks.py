"""Callbacks of a plain model: early stopping, averaged weights, learning rates, and a table of the layers.

They take the arguments of Lightning's callbacks that have the same purpose (`configs/callbacks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn


class Callback:
    """Base of the callbacks. `Training` calls the methods in the order in which they are here; each may do nothing."""

    ended_by: str | None = None
    """Reason of an end of training, read after each `looked` and after a resume; None = it goes on."""

    def begin(self, whole: nn.Module) -> None:
        """Called before the first step, when the model is on its device. Its names are those of checkpoints."""

    def stepped(self, step: int) -> None:
        """Called after each optimizer step."""

    def figures(self, optimizer: torch.optim.Optimizer) -> Mapping[str, float]:
        """Returns metrics for a row of training."""
        return {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Surrounds a validation."""
        return nullcontext()

    def looked(self, metrics: Mapping[str, float]) -> None:
        """Called with the latest metrics after each epoch, or after each validation that comes by steps."""

    def end(self) -> None:
        """Called after training, when the last checkpoint is written."""

    def save_to(self, checkpoint: dict[str, Any], name: str) -> None:
        """Adds to the content of a checkpoint, or changes it. ``name``: that of the callback."""

    def load_from(self, checkpoint: Mapping[str, Any], name: str) -> None:
        """Restores what `save_to` has added."""


class UnknownMetric(LookupError):
    """Error for a monitored metric that does not exist."""


class EarlyStopping(Callback):
    """End of training when ``monitor`` has not improved by ``min_delta`` for ``patience`` validations."""

    def __init__(
        self,
        monitor: str,
        mode: Literal["min", "max"] = "min",
        patience: int = 3,
        min_delta: float = 0.0,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode} is neither min nor max")
        self.monitor, self._patience, self._min_delta = monitor, patience, abs(min_delta)
        self._check_finite, self._enough, self._diverged = check_finite, stopping_threshold, divergence_threshold
        self._sign = -1 if mode == "min" else 1
        """Factor after which higher is better."""
        self._value, self._best, self._waited = math.nan, -self._sign * math.inf, 0

    def looked(self, metrics: Mapping[str, float]) -> None:
        if self.monitor not in metrics:
            raise UnknownMetric(self.monitor)
        self._value = metrics[self.monitor]
        if self._sign * self._value > self._sign * self._best + self._min_delta:
            self._best, self._waited = self._value, 0
        else:
            self._waited += 1
        self.ended_by = self._why()

    def _why(self) -> str | None:
        name, value = self.monitor, self._value
        if self._check_finite and not math.isfinite(value):
            return f"{name} is {value}."
        if self._enough is not None and self._sign * value > self._sign * self._enough:
            return f"{name} of {value:.4g} has passed stopping_threshold={self._enough:g}."
        if self._diverged is not None and self._sign * value <= self._sign * self._diverged:
            return f"{name} of {value:.4g} has passed divergence_threshold={self._diverged:g}."
        if self._waited < self._patience:
            return None
        return f"{name} did not improve in the last {self._waited} validations. Best: {self._best:.4g}."

    def save_to(self, checkpoint: dict[str, Any], name: str) -> None:
        checkpoint["callbacks"][name] = {"value": self._value, "best": self._best, "waited": self._waited}

    def load_from(self, checkpoint: Mapping[str, Any], name: str) -> None:
        if (state := checkpoint["callbacks"].get(name)) is not None:
            self._value, self._best, self._waited = float(state["value"]), float(state["best"]), int(state["waited"])
            self.ended_by = None if math.isnan(self._value) and not self._waited else self._why()


class Ema(Callback):
    """Exponential moving average of weights and buffers, which is validated, kept and tested.

    ``state_dict`` of a checkpoint is the average; ``current_model_state`` has the weights that training goes on with.
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        use_buffers: bool = True,
        device: str | None = None,
    ) -> None:
        self._decay, self._every, self._first = decay, update_every_n_steps, update_starting_at_step or 0
        self._use_buffers, self._device = use_buffers, device
        self._whole: nn.Module
        self._average: AveragedModel | None = None

    @property
    def is_beside_model(self) -> bool:
        """Whether the average is on the device of the model."""
        return self._device is None

    def begin(self, whole: nn.Module) -> None:
        self._whole = whole
        device = next(whole.parameters()).device if self._device is None else torch.device(self._device)
        average = get_ema_avg_fn(self._decay)  # type: ignore[no-untyped-call]
        self._average = AveragedModel(whole, device, avg_fn=average, use_buffers=self._use_buffers)

    def stepped(self, step: int) -> None:
        done = step - 1
        if done >= self._first and done % self._every == 0 and self._average is not None:
            self._average.update_parameters(self._whole)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each weight and buffer of the average with that of the model."""
        assert self._average is not None
        average, own = self._average.module, self._whole
        return zip(chain(average.parameters(), average.buffers()), chain(own.parameters(), own.buffers()), strict=True)

    def _swap(self) -> None:
        for average, own in self._pairs():
            before = average.data.clone()
            average.data.copy_(own.data)
            own.data.copy_(before)

    def end(self) -> None:
        for average, own in self._pairs():
            own.data.copy_(average.data)
        self._average = None

    def save_to(self, checkpoint: dict[str, Any], name: str) -> None:
        assert self._average is not None
        state = self._average.state_dict()
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        averaged = {key.removeprefix("module."): each for key, each in state.items() if key.startswith("module.")}
        checkpoint["state_dict"] = averaged
        checkpoint["averaging_state"] = {key: each for key, each in state.items() if not key.startswith("module.")}

    def load_from(self, checkpoint: Mapping[str, Any], name: str) -> None:
        assert self._average is not None
        state = {f"module.{key}": value for key, value in checkpoint["state_dict"].items()}
        self._average.load_state_dict({**self._average.state_dict(), **state, **checkpoint.get("averaging_state", {})})


class LrMonitor(Callback):
    """Learning rate of each parameter group, in the rows of training."""

    def __init__(self, logging_interval: Literal["step", "epoch"] | None = None) -> None:
        """``logging_interval``: all values log with each row of training."""

    def figures(self, optimizer: torch.optim.Optimizer) -> Mapping[str, float]:
        name, groups = f"lr-{type(optimizer).__name__}", optimizer.param_groups
        if len(groups) == 1:
            return {name: float(groups[0]["lr"])}
        return {f"{name}/pg{number}": float(group["lr"]) for number, group in enumerate(groups, 1)}


class ModelSummary(Callback):
    """Table of the layers and their parameters, printed before the first step."""

    def __init__(self, max_depth: int = 1) -> None:
        self._max_depth = max_depth

    def begin(self, whole: nn.Module) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table("layer", "type", "parameters", "trained")
        for name, part in whole.get_submodule("model").named_modules():
            if name.count(".") < self._max_depth:
                counts = [(weight.numel(), weight.requires_grad) for weight in part.parameters()]
                trained = sum(number for number, is_trained in counts if is_trained)
                table.add_row(name or "all", type(part).__name__, f"{sum(n for n, _ in counts):,}", f"{trained:,}")
        Console().print(table)
