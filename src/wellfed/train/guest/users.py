"""Checks the callbacks of Lightning that a configuration names, before there is a Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from wellfed.extras import other_lightning


def fault_of_callback(callback: Any, strategy: str) -> tuple[str, str] | None:
    """Returns problem and advice for an object that can't be a callback; None if it can."""
    name = f"{type(callback).__module__}.{type(callback).__qualname__}"
    if not isinstance(callback, pl.Callback):
        return other_lightning(type(callback), "Callback") or (
            f"{name} is no callback.",
            "Name a class that inherits from lightning.pytorch.Callback.",
        )
    if isinstance(callback, StochasticWeightAveraging):
        problem = f"{name} sets the average at the end of training, when the last checkpoint is written and validated."
        return problem, "Set callbacks=ema, whose average is validated and saved."
    if strategy == "fsdp" and isinstance(callback, WeightAveraging):
        return f"{name} averages whole weights, and fsdp shards them.", "Set trainer.strategy=ddp, or leave it out."
    return None


def is_average_beside_model(callback: Any) -> bool:
    """Returns whether a callback keeps a second copy of the weights on their device."""
    return isinstance(callback, WeightAveraging) and callback._device is None
