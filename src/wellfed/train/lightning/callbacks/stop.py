"""Ends a run after a step or a validation once a signal has come; saves a checkpoint after an error between steps."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import lightning.pytorch as pl

from wellfed.errors import first_line
from wellfed.process import Stopped, StopRequest
from wellfed.train.lightning.callbacks.clock import is_within_step
from wellfed.train.lightning.callbacks.users import averages_weights
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
        self._is_stopping = True
        self._before_stop(trainer)
        raise Stopped(self._request.signum or signal.SIGTERM, is_of_all=True)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._request.is_stepping = False
        if self._will_stop or (self._is_alone and self._request.signum is not None):  # the last checkpoint is written
            self._is_stopping = True
            raise Stopped(self._request.signum or signal.SIGTERM, is_of_all=True)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Saves the state after an error between two steps. One within a step loses those since the last checkpoint."""
        self._request.is_stepping = False
        if self._is_stopping or not self._has_stepped or isinstance(exception, NonFiniteLoss):
            return
        try:
            if self._is_alone and _is_between_steps(trainer):  # saving is a collective
                self._before_stop(trainer)
        except Exception as error:  # noqa: BLE001  the first error is the one to report
            _LOG.warning("The state after step %d could not be saved: %s", trainer.global_step, first_line(error))
            _LOG.info("saving it", exc_info=True)


def ranks_agree_now(trainer: pl.Trainer) -> bool:
    """Returns whether ranks compare at the end of this batch. By hand it may have any number of optimizer steps."""
    trained: int = trainer.fit_loop.epoch_loop.batch_progress.total.ready // trainer.accumulate_grad_batches
    return trained % AGREE_EVERY_STEPS == 0


def _is_between_steps(trainer: pl.Trainer) -> bool:
    """Returns whether all batches that the loader has given are trained, and no validation or epoch's end is due.

    Some callbacks may have seen the end of a validation or an epoch, and others not.
    """
    loop, loader = trainer.fit_loop.epoch_loop, trainer.train_dataloader
    progress, epochs = loop.batch_progress.current, trainer.fit_loop.epoch_progress.current
    is_in_batch_end = progress.completed < progress.processed
    if trainer.validating or progress.started != progress.processed or epochs.completed < epochs.processed:
        return False
    # The average of the weights may lack this step.
    if is_in_batch_end and (averages_weights(trainer) or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)):
        return False
    position = loader.state_dict() if hasattr(loader, "state_dict") else {}
    steps, parts = divmod(progress.processed, trainer.accumulate_grad_batches)
    if parts or "batch" not in position:
        return False
    is_before_epoch = steps == 0 and position["epoch"] < trainer.current_epoch
    return is_before_epoch or bool(position["batch"] == steps)
