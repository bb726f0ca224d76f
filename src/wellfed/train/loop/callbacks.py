"""Callbacks of a plain model: early stopping, averaged weights, learning rates, and a table of the layers.

They take the arguments of Lightning's callbacks that have the same purpose (`configs/callbacks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn


class Callback:
    """Base of the callbacks. `Training` calls the methods in the order in which they are here; each may do nothing."""

    def begin(self, whole: nn.Module, *, at_epoch_end: bool) -> None:
        """Called before the first step, when the model is on its device. Its names are those of checkpoints.

        Args:
            at_epoch_end: validations come at the ends of epochs, not after a number of steps.
        """

    def stepped(self, step: int) -> None:
        """Called after each optimizer step."""

    def figures(self, optimizer: torch.optim.Optimizer) -> Mapping[str, float]:
        """Returns metrics for a row of training."""
        return {}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surrounds a validation."""
        yield

    def validated(self, metrics: Mapping[str, float]) -> str | None:
        """Called after a validation with the latest metrics; returns why training ends, or None."""
        return None

    def epoch_ended(self, metrics: Mapping[str, float]) -> str | None:
        """Called at the end of an epoch, as `validated`."""
        return None

    def end(self) -> None:
        """Called after training, when the last checkpoint is written."""

    def state_dict(self) -> dict[str, Any]:
        """Returns values for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""

    def save_to(self, checkpoint: dict[str, Any]) -> None:
        """Changes the content of a checkpoint before it is written."""

    def load_from(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores what `save_to` has changed."""


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
        self.monitor, self.mode, self._patience, self._min_delta = monitor, mode, patience, abs(min_delta)
        self._check_finite, self._enough, self._diverged = check_finite, stopping_threshold, divergence_threshold
        self._best = math.inf if mode == "min" else -math.inf
        self._waited = 0
        self._at_epoch_end = True

    def begin(self, whole: nn.Module, *, at_epoch_end: bool) -> None:
        self._at_epoch_end = at_epoch_end

    def validated(self, metrics: Mapping[str, float]) -> str | None:
        return None if self._at_epoch_end else self._look(metrics)

    def epoch_ended(self, metrics: Mapping[str, float]) -> str | None:
        return self._look(metrics) if self._at_epoch_end else None

    def _look(self, metrics: Mapping[str, float]) -> str | None:
        if self.monitor not in metrics:
            raise UnknownMetric(self.monitor)
        value, is_better = metrics[self.monitor], self._is_better
        if self._check_finite and not math.isfinite(value):
            return f"{self.monitor} is {value}."
        if self._enough is not None and is_better(value, self._enough):
            return f"{self.monitor} of {value:.4g} has passed stopping_threshold={self._enough:g}."
        if self._diverged is not None and not is_better(value, self._diverged):
            return f"{self.monitor} of {value:.4g} has passed divergence_threshold={self._diverged:g}."
        if is_better(value, self._best - self._min_delta if self.mode == "min" else self._best + self._min_delta):
            self._best, self._waited = value, 0
            return None
        self._waited += 1
        if self._waited < self._patience:
            return None
        return f"{self.monitor} did not improve in the last {self._waited} validations. Best: {self._best:.4g}."

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self.mode == "min" else value > other

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited = float(state["best"]), int(state["waited"])


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
        self._whole: nn.Module | None = None
        self._average: AveragedModel | None = None

    @property
    def is_beside_model(self) -> bool:
        """Whether the average is on the device of the model."""
        return self._device is None

    def begin(self, whole: nn.Module, *, at_epoch_end: bool) -> None:
        self._whole = whole
        device = next(whole.parameters()).device if self._device is None else torch.device(self._device)
        average = get_ema_avg_fn(self._decay)  # type: ignore[no-untyped-call]
        self._average = AveragedModel(whole, device, avg_fn=average, use_buffers=self._use_buffers)

    def stepped(self, step: int) -> None:
        done = step - 1
        if done >= self._first and done % self._every == 0 and self._average is not None and self._whole is not None:
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
        assert self._whole is not None
        average, own = self._average.module, self._whole
        return zip(chain(average.parameters(), average.buffers()), chain(own.parameters(), own.buffers()), strict=True)

    def _swap(self) -> None:
        for average, own in self._pairs() if self._average is not None else ():
            before = average.data.clone()
            average.data.copy_(own.data)
            own.data.copy_(before)

    def end(self) -> None:
        for average, own in self._pairs():
            own.data.copy_(average.data)
        self._average = self._whole = None

    def save_to(self, checkpoint: dict[str, Any]) -> None:
        if self._average is None:
            return
        state = self._average.state_dict()
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        averaged = {name.removeprefix("module."): each for name, each in state.items() if name.startswith("module.")}
        checkpoint["state_dict"] = averaged
        checkpoint["averaging_state"] = {name: each for name, each in state.items() if not name.startswith("module.")}

    def load_from(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._average is not None
        state = {f"module.{name}": value for name, value in checkpoint["state_dict"].items()}
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

    def begin(self, whole: nn.Module, *, at_epoch_end: bool) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table("layer", "type", "parameters", "trained")
        model = whole.get_submodule("model")
        for name, part in model.named_modules():
            if name.count(".") >= self._max_depth:
                continue
            weights = list(part.parameters())
            trained = sum(weight.numel() for weight in weights if weight.requires_grad)
            row = (name or "all", type(part).__name__, f"{sum(map(Tensor.numel, weights)):,}", f"{trained:,}")
            table.add_row(*row)
        Console().print(table)
