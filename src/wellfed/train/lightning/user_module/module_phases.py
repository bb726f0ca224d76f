"""Times forward, backward and optimizer in the steps of a user's LightningModule."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, StepClock


class ModulePhases(pl.Callback):
    """Marks of the phases on the step clock, by Lightning's hooks. Must be the first callback after `Clock`.

    The forward pass begins with the batch. Phases are unknown with manual optimization, and for a module that calls
    its optimizer without Lightning.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._has_stepped = False
        """An optimizer's step was seen. Without one, its time would count as that of another phase."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._begin(FORWARD)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: torch.Tensor) -> None:
        self._begin(BACKWARD)

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self._begin(OTHER)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self._has_stepped = module.automatic_optimization
        self._begin(OPTIMIZER)

    def _begin(self, phase: int) -> None:
        if self._has_stepped:
            self._clock.mark((phase, self._clock.now_s()))
