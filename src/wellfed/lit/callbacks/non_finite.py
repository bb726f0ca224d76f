"""What ``trainer.on_nan`` means for a user's own LightningModule, whose losses are seen on their way to backward."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from wellfed.record import OnEvent
from wellfed.step.non_finite import USUAL_CAUSES, NonFiniteLoss, OnNan, halve_rate


class NonFinite(pl.Callback):
    """Ends training at a loss that is no finite number, or leaves out the optimizer steps of its batch.

    With ``raise`` the device is asked every ``every`` steps and before each checkpoint, which so never holds what came
    of such a loss; with ``skip`` and ``halve_lr`` at every optimizer step.
    """

    def __init__(self, action: OnNan, *, every: int, on_event: OnEvent) -> None:
        self._action, self._every, self._on_event = action, every, on_event
        self._is_finite: Tensor | None = None
        self._looked_at_step = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._looked_at_step = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._action != "raise":
            self._is_finite = None

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        is_finite = torch.isfinite(loss.detach()).all()
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._action == "raise" or self._is_all_finite(trainer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # an optimizer leaves out what has no gradient
        if self._action == "halve_lr":
            halve_rate(optimizer, [config.scheduler for config in trainer.lr_scheduler_configs])
        self._on_event("nan", step=trainer.global_step + 1, action=self._action)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step // self._every > self._looked_at_step // self._every:
            self._look(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self._look(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._look(trainer)

    def _look(self, trainer: pl.Trainer) -> None:
        if self._action != "raise":
            return
        first, self._looked_at_step = self._looked_at_step + 1, trainer.global_step
        is_finite, self._is_finite = self._is_all_finite(trainer), None
        if not is_finite:
            raise NonFiniteLoss(
                f"The training loss was not a finite number within the steps {first} to {trainer.global_step}. "
                f"{USUAL_CAUSES} trainer.on_nan=skip or halve_lr leave such steps out."
            )

    def _is_all_finite(self, trainer: pl.Trainer) -> bool:
        """Of all ranks since the last question; waits for the device."""
        decision = self._is_finite is None or bool(self._is_finite)
        if trainer.world_size > 1:
            decision = trainer.strategy.reduce_boolean_decision(decision, all=True)
        return decision
