"""Times forward, backward and optimizer in the steps of a user's LightningModule."""

from __future__ import annotations

import functools
import inspect
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch

from wellfed.observe.timing.step_clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, StepClock


class ModulePhases(pl.Callback):
    """Marks of the phases on the step clock. Must be the first callback after `Clock`.

    Forward is ``training_step``. With manual optimization it is ``training_step`` without ``manual_backward`` and the
    steps of optimizers. Phases are unknown in a step whose only backward passes are calls of ``loss.backward()``.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock, self._is_on_gpu = clock, False
        self._between = OTHER
        """Phase after a backward pass or an optimizer's step."""
        self._depth = 0
        """Steps of optimizers that have begun and not ended. One may call its base class's, which has hooks too."""
        self._attached = ExitStack()

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        is_manual, step = not module.automatic_optimization, module.training_step
        self._is_on_gpu, self._depth = module.device.type == "cuda", 0

        @functools.wraps(step)
        def training_step(*arguments: Any, **named: Any) -> Any:
            self._between = FORWARD if is_manual else OTHER
            self._begin(FORWARD)
            try:
                return step(*arguments, **named)
            finally:
                self._between = OTHER
                self._begin(OTHER)

        training_step.__wrapped__ = inspect.unwrap(step)  # Lightning unwraps once
        own = {name: value for name, value in vars(module).items() if name == "training_step"}  # as by `compile_step`
        vars(module)["training_step"] = training_step
        self._attached.callback(vars(module).update, own)  # called last
        self._attached.callback(vars(module).pop, "training_step", None)
        for optimizer in trainer.optimizers:
            for hook in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ):
                self._attached.callback(hook.remove)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: torch.Tensor) -> None:
        self._begin(BACKWARD)

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self._begin(self._between)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self._begin(OPTIMIZER)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._attached.close()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self._attached.close()

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Called before each step of an optimizer; with a closure, forward and backward passes come first."""
        self._depth += 1
        if len(arguments) == 1 and named.get("closure") is None:
            self._begin(OPTIMIZER)

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._begin(self._between)

    def _begin(self, phase: int) -> None:
        """Begins a phase, unless the device records a CUDA graph, which would record the mark."""
        if not (self._is_on_gpu and torch.cuda.is_current_stream_capturing()):
            self._clock.mark((phase, self._clock.now_s()))
