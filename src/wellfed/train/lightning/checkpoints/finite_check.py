"""Checks that weights and losses are finite before they are saved."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, between


def check_finite(trainer: pl.Trainer, first: int) -> None:
    """Raises NonFiniteLoss on all ranks if weights or losses of one are not finite. Waits for the device.

    Args:
        first: first step that may have changed them, for the message.
    """
    is_good = is_finite(trainer.lightning_module)
    if trainer.world_size > 1:
        is_good = trainer.strategy.reduce_boolean_decision(is_good, all=True)
    if not is_good:
        raise NonFiniteLoss(
            f"The training loss or a weight became NaN or infinite {between(first, trainer.global_step)}; they are not "
            f"saved. {USUAL_CAUSES} trainer.on_nan=skip leaves out steps whose loss is NaN or infinite."
        )


def is_finite(module: pl.LightningModule) -> bool:
    """Returns whether trained weights and losses since the last row are finite on this rank. Waits once."""
    trained = (weight for weight in module.parameters() if weight.requires_grad and not is_lazy(weight))
    weights = [weight.detach() for weight in trained if weight.numel()]
    largest = [get_total_norm(weights, norm_type=math.inf)] if weights else []  # NaN if any is
    losses = [module.plain.totals.state_dict()["sums"].get("loss")] if isinstance(module, StepModule) else []
    found = [value.reshape(()).float().to(module.device) for value in [*largest, *losses] if value is not None]
    return not found or bool(torch.isfinite(torch.stack(found)).all())
