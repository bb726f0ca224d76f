"""Whether what training has made is still made of numbers, asked before it is kept."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from wellfed.lit.module import StepModule
from wellfed.step.non_finite import USUAL_CAUSES


def is_finite(module: pl.LightningModule) -> bool:
    """Of the weights that are trained, and of a `StepModule`'s losses since its last row; waits for the device once.

    On this rank alone.
    """
    weights = [
        weight.detach()
        for weight in module.parameters()
        if weight.requires_grad and not is_lazy(weight) and weight.numel()
    ]
    largest = [get_total_norm(weights, norm_type=math.inf)] if weights else []  # NaN where any is
    losses = [module.totals.state_dict()["sums"].get("loss")] if isinstance(module, StepModule) else []
    found = [value.reshape(()).float().to(module.device) for value in [*largest, *losses] if value is not None]
    return not found or bool(torch.isfinite(torch.stack(found)).all())


def no_longer_finite(first: int, last: int) -> str:
    """What became of a training whose weights or loss are not finite after the step ``last``."""
    when = f"in step {last}" if first >= last else f"within the steps {first} to {last}"
    return (
        f"The weights or the training loss became no finite numbers {when}; they are not saved. {USUAL_CAUSES} "
        "trainer.on_nan=skip leaves out steps whose loss is no finite number."
    )
