"""Times forward, backward and optimizer in the steps of a user's LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import do_nothing_closure

from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, StepClock


class ModulePhases(pl.Callback):
    """Marks of the phases on the step clock. Must be the first callback after `Clock`.

    Forward is ``training_step``. With manual optimization it is ``training_step`` without ``manual_backward`` and the
    steps of optimizers. The Trainer's strategy is called for both, so module and optimizers stay as they are. It is not
    called for ``loss.backward()`` and for optimizers without Lightning's wrapper: phases are then unknown.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock, self._is_on_gpu = clock, False
        self._between = OTHER
        """Phase after a backward pass or an optimizer's step."""
        self._has_stepped = False
        """An optimizer's step was seen. Without one, its time would count as that of another phase."""
        self._attached = ExitStack()

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        is_manual, strategy = not module.automatic_optimization, trainer.strategy
        step, step_of_optimizer = strategy.training_step, strategy.optimizer_step
        self._is_on_gpu, self._has_stepped = module.device.type == "cuda", False

        def training_step(*arguments: Any, **named: Any) -> Any:
            self._between = FORWARD if is_manual else OTHER
            self._begin(FORWARD)
            try:
                return step(*arguments, **named)
            finally:
                self._between = OTHER
                self._begin(OTHER)

        def optimizer_step(optimizer: Any, closure: Callable[[], Any], *arguments: Any, **named: Any) -> Any:
            def timed_closure() -> Any:
                """Makes forward and backward passes; scalers and clipping follow."""
                result = closure()
                self._begin(OPTIMIZER)
                return result

            if is_without := closure is do_nothing_closure:
                self._begin(OPTIMIZER)
            try:
                return step_of_optimizer(optimizer, closure if is_without else timed_closure, *arguments, **named)
            finally:
                self._begin(self._between)

        instead = {"training_step": training_step, "optimizer_step": optimizer_step}
        own = {name: vars(strategy)[name] for name in instead if name in vars(strategy)}
        self._attached.callback(vars(strategy).update, own)  # called last
        for name in instead:
            self._attached.callback(vars(strategy).pop, name, None)
        vars(strategy).update(instead)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: torch.Tensor) -> None:
        self._begin(BACKWARD)

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self._begin(self._between)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._attached.close()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self._attached.close()

    def _begin(self, phase: int) -> None:
        """Begins a phase, unless the device records a CUDA graph, which would record the mark."""
        self._has_stepped = self._has_stepped or phase == OPTIMIZER
        if self._has_stepped and not (self._is_on_gpu and torch.cuda.is_current_stream_capturing()):
            self._clock.mark((phase, self._clock.now_s()))
