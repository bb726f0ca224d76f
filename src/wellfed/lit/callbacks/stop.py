"""Ends a run at the end of a step or a validation when a signal has asked for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from wellfed.errors import DataError
from wellfed.stop_request import Stopped, StopRequest

AGREE_EVERY_STEPS = 10
"""With several ranks, which must stop at the same step: asking one another costs a collective and a wait."""


class StopAtStepEnd(pl.Callback):
    """Must be the last callback: a checkpoint is written before the run ends."""

    def __init__(self, request: StopRequest, before_stop: Callable[[pl.Trainer], None]) -> None:
        self._request, self._before_stop = request, before_stop
        self._is_stopping = False

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        # Lightning has put its own SIGTERM handler before ours: it would end the ranks without a checkpoint.
        self._request.install()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._request.is_stepping = True
        if trainer.world_size == 1:
            self._stop_if_asked(trainer)  # one that was lost on its way here
            self._request.is_stepping = True

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world_size == 1 or trainer.global_step % AGREE_EVERY_STEPS == 0:
            self._stop_if_asked(trainer)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._request.is_stepping = True

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        is_asked = self._request.signum is not None
        if trainer.world_size > 1:
            is_asked = trainer.strategy.reduce_boolean_decision(is_asked, all=False)
        else:
            self._request.is_stepping = False
        if is_asked:
            self._stop(trainer)
            raise Stopped(self._request.signum or signal.SIGTERM, is_of_all=True)

    def _stop(self, trainer: pl.Trainer) -> None:
        self._is_stopping = True
        self._before_stop(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._request.is_stepping = False

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        was_stepping, self._request.is_stepping = self._request.is_stepping, False
        came_with_a_batch = isinstance(exception, (Stopped, DataError))
        if came_with_a_batch and not (was_stepping or self._is_stopping) and _is_between_steps(trainer):
            self._stop(trainer)


def _is_between_steps(trainer: pl.Trainer) -> bool:
    """It happened while a batch was waited for: what is trained and where the loader is agree."""
    loader = trainer.train_dataloader
    if trainer.world_size > 1 or not hasattr(loader, "state_dict"):
        return False
    processed: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    return processed > 0 and loader.state_dict().get("batch") == processed
