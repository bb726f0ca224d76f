"""Calls the hooks of Lightning that lie within a step, which of a plain model is ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from wellfed.train.step.train_step import StepListener

HOOKS = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
"""Of a callback: all but its state."""
IN_STEP = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Those that Lightning calls between the start of a step and the update of the weights."""


def hooks_of(owner: Any, among: Sequence[str] = HOOKS, base: type = pl.Callback) -> list[str]:
    """Returns the hooks that a callback or module overrides."""
    own = ((name, getattr(getattr(owner, name), "__func__", None)) for name in among)
    return [name for name, function in own if function is not getattr(base, name)]


class CallbacksInStep(StepListener):
    """The callbacks of a Trainer, each hook in their order."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer, self._module = trainer, module

    def before_backward(self, loss: Tensor) -> None:
        self._tell("on_before_backward", loss)

    def after_backward(self) -> None:
        self._tell("on_after_backward")

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._tell("on_before_optimizer_step", optimizer)

    def _tell(self, hook: str, *about: Any) -> None:
        trainer, attributes = self._trainer, vars(self._module)
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], hook  # what `module.log` goes by
        for callback in trainer.callbacks:
            getattr(callback, hook)(trainer, self._module, *about)
        attributes["_current_fx_name"] = before
