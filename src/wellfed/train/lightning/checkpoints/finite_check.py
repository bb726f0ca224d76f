"""Checks that weights and losses are finite before they are saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import lightning.pytorch as pl
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, between


class FiniteCheck:
    """Refuses to save weights or a loss that are not finite, and names the steps in which that began.

    Args:
        finite_step: returns the step up to which all losses are known to be finite.
    """

    def __init__(self, finite_step: Callable[[], int]) -> None:
        self._finite_step, self._checked_step = finite_step, 0
        self._unset: frozenset[str] = frozenset()

    def start(self, trainer: pl.Trainer) -> None:
        """Notes the buffers that are NaN before training. A loaded checkpoint was checked when it was written."""
        self._unset = unset_buffers(trainer.lightning_module)
        self._checked_step = trainer.global_step

    def check(self, trainer: pl.Trainer) -> None:
        """Raises NonFiniteLoss on all ranks if weights or loss of one are not finite. Waits for the device."""
        step, is_good = trainer.global_step, is_finite(trainer.lightning_module, self._unset)
        if trainer.world_size > 1:
            is_good = trainer.strategy.reduce_boolean_decision(is_good, all=True)
        if not is_good:
            # A finite loss was computed with the weights before its step.
            raise NonFiniteLoss(no_longer_finite(max(self._checked_step + 1, self._finite_step()), step))
        self._checked_step = step


def is_finite(module: pl.LightningModule, unset: Collection[str] = ()) -> bool:
    """Returns whether weights and losses since the last row are finite on this rank. Waits for the device once.

    Buffers may be infinite, as masks are, but not NaN. Buffers in ``unset`` may be NaN.
    """
    trained = (weight for weight in module.parameters() if weight.requires_grad and not is_lazy(weight))
    weights = [weight.detach() for weight in trained if weight.numel()]
    largest = [get_total_norm(weights, norm_type=math.inf)] if weights else []  # NaN if any is
    if buffers := [buffer for name, buffer in _floats(module) if name not in unset]:
        largest.append(get_total_norm(buffers, math.inf).nan_to_num(nan=math.nan, posinf=0.0))
    losses = [module.plain.totals.state_dict()["sums"].get("loss")] if isinstance(module, StepModule) else []
    found = [value.reshape(()).float().to(module.device) for value in [*largest, *losses] if value is not None]
    return not found or bool(torch.isfinite(torch.stack(found)).all())


def unset_buffers(module: pl.LightningModule) -> frozenset[str]:
    """Returns the names of buffers that are NaN before training, which marks them as empty."""
    return frozenset(name for name, buffer in _floats(module) if bool(buffer.isnan().any()))


def _floats(module: pl.LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers of floating point, by name."""
    for name, buffer in module.named_buffers():
        is_dense = not is_lazy(buffer) and buffer.layout is torch.strided
        if is_dense and buffer.is_floating_point() and buffer.numel():
            yield name, buffer


def no_longer_finite(first: int, last: int) -> str:
    """Returns the message for weights or a loss that are not finite after the step ``last``."""
    return (
        f"The training loss, a weight or a buffer became NaN or infinite {between(first, last)}; they are not saved. "
        f"{USUAL_CAUSES} trainer.on_nan=skip leaves out steps whose loss is NaN or infinite."
    )
