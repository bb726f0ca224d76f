"""Adds ``trainer.on_nan``, ``gpu.compile`` and a Trainer with loggers to a user's LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from wellfed.observe.timing.wall import Wall
from wellfed.record.entries import OnEvent
from wellfed.train.lightning.callbacks.clock import delivery_of, is_within_step
from wellfed.train.lightning.callbacks.users import Last
from wellfed.train.lightning.hooks import overrides
from wellfed.train.lightning.trainer import TrainerOptions, make_trainer
from wellfed.train.memory.oom import MemoryFailure, classify
from wellfed.train.memory.step_start import StepStart
from wellfed.train.step.compiled import Compiled
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, OnNan, all_finite, between


def make_user_trainer(
    options: TrainerOptions,
    callbacks: Sequence[pl.Callback],
    folder: Path,
    *,
    users: Sequence[pl.Callback] = (),
    last: Sequence[pl.Callback] = (),
    loggers: Sequence[Any],
    log_every: int = 50,
    sanity_batches: int = 0,
    wall: Wall | None = None,
) -> pl.Trainer:
    """Returns a Trainer like `make_trainer`, with loggers for a module or callbacks of the user that log.

    ``last`` are callbacks that come after ``users`` and after those of a LightningModule.
    """
    return make_trainer(
        options,
        [*callbacks, Last(last, users, wall or Wall())],
        folder,
        users=users,
        logger=loggers,
        log_every_n_steps=log_every,
        num_sanity_val_steps=sanity_batches,
    )


def compile_step(module: Any, mode: str, on_failure: Callable[[str], None]) -> None:
    """Compiles the module's ``training_step``. If that fails, the step runs uncompiled from then on, with a warning.

    Only for automatic optimization: a failed step is repeated, so it must not have called the optimizer.
    """
    module.training_step = _CompiledStep(module, mode, on_failure)


class _CompiledStep:
    """A module's compiled ``training_step``. A deep copy of the module gets its own step, uncompiled."""

    def __init__(self, module: Any, mode: str, on_failure: Callable[[str], None]) -> None:
        self.__wrapped__ = module.training_step  # Lightning reads its arguments
        self._module, self._compiled = module, Compiled(module.training_step, mode, on_failure)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self._compiled(*arguments, **named)
        finally:
            if self._compiled.has_compiled:
                self._compiled.has_compiled, self._module.was_disturbed = False, True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = memo.get(id(self._module))
        if other is None:  # the step is copied without its module, or by a __deepcopy__ that enters no copy
            return self
        return type(other).training_step.__get__(other)


def builds_itself_later(module: pl.LightningModule) -> bool:
    """Returns whether the module may make layers once it has a Trainer, so that weights can't be compared yet."""
    return overrides(module, "setup") or overrides(module, "configure_model")


class StepMemory(pl.Callback):
    """Record of an out-of-memory error in a training step, or while its batch is moved to the device."""

    def __init__(self) -> None:
        self.failure: MemoryFailure | None = None
        self.samples = 0
        """Samples of the failed step on this rank."""
        self._done: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not is_within_step(trainer):
            self._done = delivery_of(trainer, None)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        step = delivery_of(trainer, None)
        if trainer.training and step is not None and step is not self._done:
            self.failure, self.samples = classify(exception), step.size


class NonFinite(pl.Callback):
    """``trainer.on_nan``: ends training at a non-finite loss, or skips the optimizer step and restores buffers.

    Steps with non-finite gradients are skipped too, unless a scaler does that. With ``raise`` the device is read every
    ``every`` steps and before each checkpoint, so that no checkpoint has non-finite weights. With ``skip`` it is read
    at every optimizer step.
    """

    def __init__(self, action: OnNan, *, every: int, on_event: OnEvent) -> None:
        self._action, self._every, self._on_event = action, every, on_event
        self._is_finite: Tensor | None = None
        self._checked_step = 0
        self._start: StepStart | None = None

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._checked_step = trainer.global_step
        if self._action != "raise":
            self._start = StepStart(module, module.device)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._start is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._is_finite = None
            self._start.take()

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        is_finite = torch.isfinite(loss.detach()).all()
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._start is None:
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            gradients = all_finite(weight.grad for weight in weights if weight.grad is not None)
            self._is_finite = gradients if self._is_finite is None else self._is_finite & gradients
        if self._is_all_finite(trainer):
            return
        self._start.restore_buffers()
        for weight in weights:
            weight.grad = None  # an optimizer skips weights without a gradient
        self._on_event("nan", step=trainer.global_step + 1, action="skip")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step // self._every > self._checked_step // self._every:
            self._check(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self._check(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._check(trainer)

    def _check(self, trainer: pl.Trainer) -> None:
        if self._action != "raise":
            return
        first, self._checked_step = self._checked_step + 1, trainer.global_step
        is_finite, self._is_finite = self._is_all_finite(trainer), None
        if not is_finite:
            raise NonFiniteLoss(
                f"The training loss was not a finite number {between(first, trainer.global_step)}. "
                f"{USUAL_CAUSES} trainer.on_nan=skip leaves such steps out."
            )

    def _is_all_finite(self, trainer: pl.Trainer) -> bool:
        """Returns whether all losses since the last check are finite on all ranks; waits for the device."""
        decision = self._is_finite is None or bool(self._is_finite)
        if trainer.world_size > 1:
            decision = trainer.strategy.reduce_boolean_decision(decision, all=True)
        return decision


# -- parts of a step's batch, split by `TimedLoader`; Lightning sums their gradients -----------------------------------


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
