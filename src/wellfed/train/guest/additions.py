"""Adds ``trainer.on_nan=skip`` and ``gpu.compile`` to a LightningModule of the user."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from wellfed.record.entries import OnEvent
from wellfed.train.memory.step_start import StepStart
from wellfed.train.step.loss import Compiled
from wellfed.train.step.non_finite import all_finite


def compile_step(module: Any, mode: str) -> None:
    """Compiles the module's ``training_step``; an error of it gets a note that names ``gpu.compile``."""
    compiled = Compiled(module.training_step, mode)

    @wraps(module.training_step)  # Lightning reads its arguments
    def training_step(*arguments: Any, **named: Any) -> Any:
        try:
            return compiled(*arguments, **named)
        finally:
            if compiled.has_compiled:
                compiled.has_compiled, module.was_disturbed = False, True

    module.training_step = training_step


class SkipsNonFinite(pl.Callback):
    """``trainer.on_nan=skip``: leaves out optimizer steps with a non-finite loss or gradient, and restores buffers.

    Reads the device at every optimizer step. With a gradient scaler, it alone judges gradients.
    """

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._sum: Tensor | float = 0.0
        """Losses of the step."""
        self._start: StepStart

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._start = StepStart(module, module.device)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._sum = 0.0
            self._start.take()

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        self._sum = loss.detach().float().sum() + self._sum

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            gradients = all_finite(weight.grad for weight in weights if weight.grad is not None)
            self._sum = self._sum + torch.where(gradients, 0.0, torch.nan)
        if trainer.strategy.reduce_boolean_decision(math.isfinite(self._sum), all=True):
            return
        self._start.restore(repeats=False)
        for weight in weights:
            weight.grad = None  # an optimizer skips weights without a gradient
        self._on_event("nan", step=trainer.global_step + 1, action="skip")
