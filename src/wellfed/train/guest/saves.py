"""Saves checkpoints and ends a training between two steps: at signals, by a pruner, or when its state is not finite."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from wellfed.process import Stopped, StopRequest
from wellfed.train.guest.figures import monitored
from wellfed.train.guest.marks import Watch, is_within_step
from wellfed.train.guest.reading import Place
from wellfed.train.loop.checkpoint_files import BEST, LAST
from wellfed.train.loop.checkpoints import Checkpoints, is_finite, non_finite
from wellfed.train.loop.training import AGREE_EVERY_STEPS
from wellfed.train.step.non_finite import NonFiniteLoss


class Saves(Checkpoint):
    """Saves every n steps and every n minutes, and after each epoch if no step count is given.

    A step is saved after its validation, and an epoch's last step after the epoch. By then, callbacks and schedulers
    that monitor a validation have changed their state. Lightning calls a `Checkpoint` after all other callbacks.
    """

    monitor = None

    def __init__(
        self,
        files: Checkpoints,
        metrics: Mapping[str, float],
        stop: StopRequest,
        watch: Watch,
        place: Place,
        *,
        by_monitor: bool,
        check_every_steps: int,
        prune: Callable[[int], str | None],
    ) -> None:
        """
        Args:
            metrics: the latest metrics by name, such as ``val/loss``.
            by_monitor: the first validation metric that a callback or scheduler monitors picks ``best.ckpt``.
            check_every_steps: steps after which weights must be finite.
            prune: called after each validation on rank 0; returns why training ends, or None.
        """
        self.files, self._metrics, self._stop, self._place = files, metrics, stop, place
        self._by_monitor, self._prune, self._check_every = by_monitor, prune, check_every_steps
        self.pruned: str | None = None
        """Reason of an end by the pruner."""
        self._saved_at_s = time.monotonic()
        self._step = self._checked_step = 0
        self._is_due = False
        watch.before_fetch = self._between_steps

    @property
    def best_model_path(self) -> str:
        """Path of ``best.ckpt``, else of ``last.ckpt``, else empty, under the name that `ModelCheckpoint` has."""
        best = self.files.folder.absolute() / BEST
        return str(best) if best.exists() else self.last_model_path

    @property
    def last_model_path(self) -> str:
        last = self.files.folder.absolute() / LAST
        return str(last) if last.exists() else ""

    @property
    def best_model_score(self) -> Tensor | None:
        return None if self.files.best_value is None else torch.tensor(self.files.best_value)

    def before_users(self) -> pl.Callback:
        """Returns a callback that saves what is due before the user's callbacks begin an epoch, or end the training:
        they may then replace the weights by their average, and a resumed training must not start from it."""
        early = pl.Callback()
        vars(early).update(on_train_epoch_start=self._between_epochs, on_train_end=self._save_last)
        return early

    # -- when to save ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._stop.install()  # Lightning's own handler of SIGTERM would end the ranks without a checkpoint
        self._stop.is_stepping = True
        self.files.begin(partial(self._write, trainer), trainer.strategy.broadcast, trainer.global_rank)
        self._step = self._checked_step = trainer.global_step  # a loaded checkpoint was checked when it was written
        self._saved_at_s = time.monotonic()
        if self._by_monitor and (found := monitored(trainer)) is not None:
            self.files.compare_by(*found)
        if trainer.ckpt_path is not None:
            self.files.loaded(Path(trainer.ckpt_path), trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if is_within_step(trainer, batch_idx):
            return
        before, self._step = self._step, trainer.global_step  # a batch may take several optimizer steps
        saves, checks = self.files.every_steps, self._check_every
        self._is_due |= saves is not None and self._step // saves > before // saves
        if self._step // checks > before // checks:
            self._check_finite(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._is_due |= self.files.every_steps is None

    def _between_steps(self, trainer: pl.Trainer) -> None:
        """Saves and stops if due, after a step and its validation."""
        if self._place.rng is not None:
            self._place.restore_rng()
        minutes = self.files.minutes
        is_asked = self._stop.signum is not None
        is_time = minutes is not None and time.monotonic() - self._saved_at_s >= 60 * minutes
        if trainer.world_size > 1:  # all save and stop together; to agree waits for the device
            is_turn, any_of = self._place.steps % AGREE_EVERY_STEPS == 0, trainer.strategy.reduce_boolean_decision
            is_asked, is_time = (is_turn and any_of(flag, all=False) for flag in (is_asked, is_time))
        if is_asked:
            self._save_last(trainer)
            raise Stopped(self._stop.signum or signal.SIGTERM)
        if self._is_due or is_time:
            self._save_last(trainer)

    def _between_epochs(self, trainer: pl.Trainer, module: Any) -> None:
        self._between_steps(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.files.warn_without_best(self._metrics)
        self._stop.is_stepping = False
        if self._stop.signum is not None and trainer.world_size == 1:
            raise Stopped(self._stop.signum)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self._stop.is_stepping = False
        if isinstance(exception, NonFiniteLoss):
            exception.add_note(self.files.way_back())

    # -- saving ---------------------------------------------------------------------------------------------------

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        files = self.files
        value = self._metrics.get(f"val/{files.best_metric}")
        if trainer.strategy.broadcast(files.is_best(value)):  # saving is a collective, and rank 0 has the best value
            self._check_finite(trainer)
            files.save_best(0.0 if value is None else value, trainer.global_step)
        self.pruned = trainer.strategy.broadcast(self._prune(trainer.global_step))
        trainer.should_stop |= self.pruned is not None

    def _save_last(self, trainer: pl.Trainer, module: Any = None) -> None:
        self._is_due = False
        if self.files.last_step != trainer.global_step:
            self._saved_at_s = time.monotonic()
            self._check_finite(trainer)
            self.files.save_last(trainer.global_step)

    def _check_finite(self, trainer: pl.Trainer) -> None:
        """Raises NonFiniteLoss on all ranks if weights of one are not finite. Waits for the device."""
        module: Any = trainer.lightning_module  # it may handle losses that are not finite
        if not trainer.strategy.reduce_boolean_decision(is_finite(module, module.device), all=True):
            raise non_finite(self._checked_step + 1, trainer.global_step)
        self._checked_step = trainer.global_step

    def _write(self, trainer: pl.Trainer, path: Path, more: Mapping[str, Any]) -> None:
        """Writes the state with more entries, as `Trainer.save_checkpoint` does."""
        content = trainer._checkpoint_connector.dump_checkpoint()
        trainer.strategy.save_checkpoint({**content, **more}, path)  # ranks meet when `Checkpoints` knows how it went
