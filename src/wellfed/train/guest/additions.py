"""Adds ``trainer.on_nan`` and ``gpu.compile`` to a LightningModule of the user."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from wellfed.record.entries import OnEvent
from wellfed.train.memory.step_start import StepStart
from wellfed.train.step.compiled import Compiled
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, OnNan, all_finite, between


def compile_step(module: Any, mode: str, on_failure: Callable[[str], None]) -> None:
    """Compiles the module's ``training_step``. If that fails, the step runs uncompiled from then on, with a warning.

    Only for automatic optimization: a failed step is repeated, so it must not have called the optimizer.
    """
    module.training_step = _CompiledStep(module, mode, on_failure)


class _CompiledStep:
    """A module's compiled ``training_step``. A deep copy of the module gets its own step, uncompiled."""

    def __init__(self, module: Any, mode: str, on_failure: Callable[[str], None]) -> None:
        self.__wrapped__ = module.training_step  # Lightning reads its arguments
        self._module, self._compiled = module, Compiled(module.training_step, mode, on_failure)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self._compiled(*arguments, **named)
        finally:
            if self._compiled.has_compiled:
                self._compiled.has_compiled, self._module.was_disturbed = False, True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = memo.get(id(self._module))
        if other is None:  # the step is copied without its module, or by a __deepcopy__ that enters no copy
            return self
        return type(other).training_step.__get__(other)


class NonFinite(pl.Callback):
    """``trainer.on_nan``: ends training at a non-finite loss, or skips the optimizer step and restores buffers.

    Steps with non-finite gradients are skipped too, unless a scaler does that. With ``raise`` the device is read every
    ``every`` steps and before each checkpoint, so that no checkpoint has non-finite weights. With ``skip`` it is read
    at every optimizer step.
    """

    def __init__(self, action: OnNan, *, every: int, on_event: OnEvent) -> None:
        self._action, self._every, self._on_event = action, every, on_event
        self._sum: Tensor | float = 0.0
        """Losses since the last check."""
        self._checked_step = 0
        self._start: StepStart | None = None

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._checked_step = trainer.global_step
        if self._action != "raise":
            self._start = StepStart(module, module.device)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._start is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._sum = 0.0
            self._start.take()

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        # A sum is finite if all losses are, and costs a fifth of a check of each.
        self._sum = loss.detach().float().sum() + self._sum

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._start is None:
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            gradients = all_finite(weight.grad for weight in weights if weight.grad is not None)
            self._sum = self._sum + torch.where(gradients, 0.0, torch.nan)
        if self._is_all_finite(trainer):
            return
        self._start.restore_buffers()
        for weight in weights:
            weight.grad = None  # an optimizer skips weights without a gradient
        self._on_event("nan", step=trainer.global_step + 1, action="skip")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step // self._every > self._checked_step // self._every:
            self._check(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self._check(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._check(trainer)

    def _check(self, trainer: pl.Trainer) -> None:
        if self._action != "raise":
            return
        first, self._checked_step = self._checked_step + 1, trainer.global_step
        is_finite, self._sum = self._is_all_finite(trainer), 0.0
        if not is_finite:
            raise NonFiniteLoss(
                f"The training loss was not a finite number {between(first, trainer.global_step)}. "
                f"{USUAL_CAUSES} trainer.on_nan=skip leaves such steps out."
            )

    def _is_all_finite(self, trainer: pl.Trainer) -> bool:
        """Returns whether all losses since the last check are finite on all ranks; waits for the device."""
        decision = math.isfinite(self._sum)
        if trainer.world_size > 1:
            decision = trainer.strategy.reduce_boolean_decision(decision, all=True)
        return decision
