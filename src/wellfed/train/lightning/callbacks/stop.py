"""Ends a run after a step or a validation once a signal has come; saves a checkpoint after a failure."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import lightning.pytorch as pl

from wellfed.errors import OutOfMemoryExhausted, first_line
from wellfed.process import Stopped, StopRequest
from wellfed.train.lightning.callbacks.clock import is_within_step, mark_validation, validation_is_due
from wellfed.train.lightning.callbacks.users import averages_weights
from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import NonFiniteLoss

_LOG = logging.getLogger(__name__)
AGREE_EVERY_STEPS = 10
"""Trained batches between checks whether a rank must stop; each is a collective and waits for the device."""


class StopAtStepEnd(pl.Callback):
    """Stop at the end of a step, and of its validation and epoch if they are over, too.

    Must be the last callback, since it writes a checkpoint and ends the run. A signal after the first step waits,
    unless a `TimedLoader` waits for a batch.
    """

    def __init__(
        self,
        request: StopRequest,
        before_stop: Callable[[pl.Trainer], None],
        when_over: Callable[[pl.Trainer, Callable[[pl.Trainer], None]], None] | None = None,
    ) -> None:
        """
        Args:
            before_stop: saves a checkpoint.
            when_over: calls a function after the step's validation and the work at the end of its epoch, if any.
        """
        self._request, self._before_stop, self._when_over = request, before_stop, when_over
        self._will_stop = self._is_stopping = self._has_stepped = False
        self._is_alone = True

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        # Lightning's own SIGTERM handler would end the ranks without a checkpoint.
        self._request.install()
        self._is_alone = trainer.world_size == 1

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        if not self._is_alone:
            self._request.is_stepping = True
        elif self._request.signum is not None:  # it came after the last epoch's end
            self._end(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._request.is_stepping = True

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if is_within_step(trainer):
            return
        self._has_stepped = True
        if self._is_alone or ranks_agree_now(trainer):
            self._stop_if_asked(trainer)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._request.is_stepping = True

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._is_alone:
            self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        is_asked = self._request.signum is not None
        if not self._is_alone:
            is_asked = trainer.strategy.reduce_boolean_decision(is_asked, all=False)
        if not is_asked:
            return
        if self._when_over is None:
            self._end(trainer)
        self._will_stop = True
        self._when_over(trainer, self._end)

    def _end(self, trainer: pl.Trainer) -> NoReturn:
        self._stop(trainer)
        raise Stopped(self._request.signum or signal.SIGTERM, is_of_all=True)

    def _stop(self, trainer: pl.Trainer) -> None:
        self._is_stopping = True
        self._before_stop(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._request.is_stepping = False
        if self._will_stop or (self._is_alone and self._request.signum is not None):  # the last checkpoint is written
            self._is_stopping = True
            raise Stopped(self._request.signum or signal.SIGTERM, is_of_all=True)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Saves the state after the last whole step, if it can be restored and is finite."""
        self._request.is_stepping = False
        is_sound = self._has_stepped and not isinstance(exception, NonFiniteLoss)
        may_undo = not isinstance(exception, Stopped)  # after a second signal the end must be fast
        is_of_all = isinstance(exception, OutOfMemoryExhausted) and exception.is_of_all
        if self._is_stopping or not is_sound or not (trainer.world_size == 1 or is_of_all):
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        is_in_batch_end = progress.completed < progress.processed
        if averages_weights(trainer) and (trainer.validating or is_in_batch_end):
            return  # the weights may be their average, or the average may lack this step
        if trainer.validating and not validation_is_due(trainer):
            return  # some callbacks have seen its end, and others have not
        epochs = trainer.fit_loop.epoch_progress.current
        if epochs.completed < epochs.processed:
            return  # likewise for the end of the epoch, when its schedulers step, too
        try:
            is_whole = _is_after_a_whole_step(trainer, module, may_undo)
            if trainer.world_size > 1:  # saving is a collective
                is_whole = trainer.strategy.reduce_boolean_decision(is_whole, all=True)
            if not is_whole:
                return
            if is_in_batch_end and trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
                mark_validation(trainer, is_due=True)  # the step's validation has not begun
            self._stop(trainer)
        except Exception as error:  # noqa: BLE001  the first error is the one to report
            _LOG.warning("The state after step %d could not be saved: %s", trainer.global_step, first_line(error))
            _LOG.info("saving it", exc_info=True)


def ranks_agree_now(trainer: pl.Trainer) -> bool:
    """Returns whether ranks compare at the end of this batch. By hand it may have any number of optimizer steps."""
    trained: int = trainer.fit_loop.epoch_loop.batch_progress.total.ready // trainer.accumulate_grad_batches
    return trained % AGREE_EVERY_STEPS == 0


def _is_after_a_whole_step(trainer: pl.Trainer, module: Any, may_undo: bool) -> bool:
    """Restores this rank's state after the last whole step, and the loader's position; returns whether that worked.

    The loader may have given the batch of a step that has not begun, or has changed no weight yet. A stream can't go
    back by a batch.
    """
    loader = trainer.train_dataloader
    if not hasattr(loader, "state_dict"):
        return False
    progress, position = trainer.fit_loop.epoch_loop.batch_progress.current, loader.state_dict()
    steps, parts = divmod(progress.processed, trainer.accumulate_grad_batches)
    if parts or "batch" not in position:
        return False
    is_before_epoch = steps == 0 and position["epoch"] < trainer.current_epoch
    is_delivered = position["batch"] == steps + 1 and not is_before_epoch and "stream" not in position
    if progress.started != progress.processed:
        step = module.step if isinstance(module, StepModule) else None
        if not (may_undo and is_delivered and step is not None and step.undo()):
            return False
    if is_delivered:
        loader.load_state_dict({**position, "batch": steps})
        return True
    return is_before_epoch or bool(position["batch"] == steps)
