"""Writes checkpoints after all work of a step: validation, the user's callbacks, schedulers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from wellfed.train.lightning.callbacks.clock import is_within_step
from wellfed.train.lightning.callbacks.users import averages_weights, monitored
from wellfed.train.lightning.checkpoints.checkpoints import BestSoFar, Checkpoints

_LOG = logging.getLogger(__name__)


class LateCheckpoints(Checkpoints):
    """Checkpoints after the validation of their step. Those of an epoch's last step come after the epoch.

    By then, callbacks and schedulers that monitor a validation have changed their state, which an earlier checkpoint
    would lack. Must come after the user's callbacks, see `users.Last`.
    """

    best_by_monitor = False
    """Whether the first validation metric that callbacks or schedulers monitor picks ``best.ckpt``."""
    _step, _is_due = 0, False
    _is_asked = True
    """Whether the loop asks for due checkpoints, as `StepLoop` does. Lightning's own does not."""
    _instead: Callable[[pl.Trainer], None] | None = None
    """Function that is called instead of saving the next due checkpoint."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        super().on_train_start(trainer, module)
        self._step = trainer.global_step
        self._is_asked = hasattr(type(trainer.fit_loop.epoch_loop), "when_over")
        trainer.fit_loop.epoch_loop.when_over = None

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        for metric, mode in monitored(trainer) if self.best_by_monitor and not trainer.sanity_checking else ():
            if f"val/{metric}" in self._metrics:
                if (metric, mode) != (self.best.metric, self.best.mode):
                    self.best = BestSoFar(self.files.folder, metric, mode)
                self.best_by_monitor = False  # found; stays the same from now on
                break
        super().on_validation_end(trainer, module)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every, is_due = self._options.every_steps, False
        if every is not None:
            before, self._step = self._step, trainer.global_step  # a batch may take several optimizer steps
            is_due = self._step // every > before // every
        if is_due or self._is_time(trainer):
            self._is_due = True
            trainer.fit_loop.epoch_loop.when_over = self.save_if_due
        if self._is_due and not self._is_asked:  # before the validation of this step, rather than never
            self.save_if_due(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._is_due = self._is_due or self._options.every_steps is None

    def call_when_over(self, trainer: pl.Trainer, function: Callable[[pl.Trainer], None]) -> None:
        """Calls a function where a due checkpoint of this step is saved."""
        self._instead, self._is_due = function, True
        trainer.fit_loop.epoch_loop.when_over = self.save_if_due
        if not self._is_asked:
            self.save_if_due(trainer)

    def save_if_due(self, trainer: pl.Trainer) -> None:
        """Saves if due. Called after each batch within an epoch, and before the user's callbacks begin an epoch."""
        if self._is_due and not is_within_step(trainer):
            self._is_due, trainer.fit_loop.epoch_loop.when_over = False, None
            (self._instead or self.save_last)(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not averages_weights(trainer):  # else the weights are their average by now, see `BeforeUsers`
            super().on_train_end(trainer, module)
        names = sorted(name for name in self._metrics if name.startswith("val/"))
        if self.best.value is None and names and f"val/{self.best.metric}" not in names:
            _LOG.warning(
                "There is no best.ckpt: nobody logs val/%s. Set trainer.best_metric and best_mode; there are %s.",
                self.best.metric,
                ", ".join(names),
            )


class BeforeUsers(pl.Callback):
    """Due checkpoints of `LateCheckpoints`, written before the user's callbacks begin an epoch or end the training.

    At the end of training, callbacks may replace weights by their average. A resumed training must not start from it.
    """

    def __init__(self, checkpoints: LateCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._has_trained = False

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._has_trained = True

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._has_trained = self._has_trained or not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        # Else Lightning counts its validation as before the resume, and ReduceLROnPlateau skips this epoch.
        if self._has_trained:
            trainer.fit_loop._restarting = False  # its setter makes it true if max_steps is set

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._checkpoints.save_if_due(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._checkpoints.save_at_end(trainer)
