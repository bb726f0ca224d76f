"""Hands training and evaluation figures to the journal, every n steps and after each pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl

from wellfed.lit.module import NonFiniteLoss, StepModule


class TakesMetrics(Protocol):
    """Where figures go."""

    def __call__(self, split: str, values: Mapping[str, float], *, step: int, epoch: int) -> None: ...


class Figures(pl.Callback):
    """Means since the last row; the device is waited for once a row, never in between."""

    def __init__(
        self, take: TakesMetrics, *, every: int, stop_on_nan: bool, more: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        """
        Args:
            more: further figures for the sink with each training row, e.g. samples/s so far.
        """
        self._take, self._every, self._stop_on_nan, self._more = take, every, stop_on_nan, more
        self.latest: dict[str, float] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: StepModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self._every == 0:
            self._hand_over(trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: StepModule) -> None:
        self._hand_over(trainer, module)

    def _hand_over(self, trainer: pl.Trainer, module: StepModule) -> None:
        steps = module.totals.count
        values = module.totals.take()
        if not values:
            return
        loss = values.get("loss", 0.0)
        if self._stop_on_nan and not math.isfinite(loss):
            raise NonFiniteLoss(
                f"The training loss is {loss} within the {steps} steps up to step {trainer.global_step}. Usual causes: "
                "the learning rate (workload.optimizer.lr), no warm-up (workload.schedule.warmup_steps), no clipping "
                "(trainer.gradient_clip=1.0). trainer.on_nan=skip or halve_lr leave such steps out."
            )
        values["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        self.latest.update({f"train/{name}": value for name, value in values.items()})
        if trainer.is_global_zero:
            self._take("train", values, step=trainer.global_step, epoch=trainer.current_epoch)
            more = self._more() if self._more else {}
            if more:
                self._take("throughput", more, step=trainer.global_step, epoch=trainer.current_epoch)

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: StepModule) -> None:
        self._evaluated("val", trainer, module)

    def on_test_epoch_end(self, trainer: pl.Trainer, module: StepModule) -> None:
        self._evaluated("test", trainer, module)

    def _evaluated(self, split: str, trainer: pl.Trainer, module: StepModule) -> None:
        values = module.evaluated()
        self.latest.update({f"{split}/{name}": value for name, value in values.items()})
        if trainer.is_global_zero:
            self._take(split, values, step=trainer.global_step, epoch=trainer.current_epoch)
