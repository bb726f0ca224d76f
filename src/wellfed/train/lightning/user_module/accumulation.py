"""Weighs the parts of a step's batch for a user's LightningModule; Lightning sums their gradients.

`TimedLoader` splits the batch. All parts together have the samples of the step. Learning, the order of the samples and
the loader's position are the same as with whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl


def weighing_parts(trainer: pl.Trainer) -> Callable[..., Any]:
    """Returns the strategy's ``training_step`` with its loss weighed by the part; logged values are unchanged.

    The module itself stays as it is, so that a deep copy of it, such as an average of the weights, runs its own step.
    """
    step = trainer.strategy.training_step

    def training_step(*arguments: Any, **named: Any) -> Any:
        output, weight = step(*arguments, **named), getattr(trainer.train_dataloader, "weight", 1.0)
        if output is None or weight == 1:
            return output
        return {**output, "loss": output["loss"] * weight} if isinstance(output, Mapping) else output * weight

    return training_step


class SchedulersOfParts(pl.Callback):
    """Scaling of the frequency of schedulers that count batches, since Lightning counts parts."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches
