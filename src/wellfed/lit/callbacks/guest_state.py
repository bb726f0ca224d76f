"""Writes checkpoints of a user's own LightningModule when a run can go on from them exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from wellfed.lit.callbacks.callback_list import Together
from wellfed.lit.callbacks.checkpoints import Checkpoints


class GuestCheckpoints(Checkpoints):
    """Writes what is due at an epoch's last step when the epoch is over.

    Only then have the validation, the callbacks that monitor it and the schedulers that go by it done their part; a
    checkpoint from before would go on without it. Must stand behind the user's callbacks, see `Last`.
    """

    _step, _is_due = 0, False

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before, self._step = self._step, trainer.global_step  # a batch may take several optimizer steps
        every = self._every_steps
        is_due = (every is not None and self._step // every > before // every) or self._is_time(trainer)
        if trainer.is_last_batch:
            self._is_due = self._is_due or is_due
        elif is_due:
            self.save_last(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._is_due = self._is_due or self._every_steps is None

    def save_if_due(self, trainer: pl.Trainer) -> None:
        """To be called at the start of an epoch, before the user's callbacks."""
        if self._is_due:
            self._is_due = False
            self.save_last(trainer)


class AtEpochStart(pl.Callback):
    """`GuestCheckpoints.save_if_due`, before the user's callbacks begin the next epoch."""

    def __init__(self, checkpoints: GuestCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._has_trained = False

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._has_trained = True

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        # Else ReduceLROnPlateau goes without this epoch: Lightning takes its validation for one before the resume.
        if self._has_trained:
            trainer.fit_loop.restarting = False

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._checkpoints.save_if_due(trainer)


class Last(pl.Callback):
    """Puts callbacks behind those that a LightningModule brings, which Lightning puts behind ours."""

    def __init__(self, callbacks: Sequence[pl.Callback]) -> None:
        self._callbacks = callbacks

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        trainer.callbacks.append(Together(self._callbacks))
