"""Keeps ``last.ckpt``, earlier ones, and ``best.ckpt``. Only at the last save does a disk error end a run."""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from wellfed.observe.telemetry.run_progress import Progress
from wellfed.train.lightning.callbacks.clock import is_within_step
from wellfed.train.lightning.callbacks.stop import ranks_agree_now
from wellfed.train.lightning.callbacks.users import averages_weights, monitored
from wellfed.train.lightning.checkpoints.checkpoint_files import BEST, LAST
from wellfed.train.lightning.checkpoints.checkpoint_writer import BEST_VALUES, CheckpointWriter, check_finite
from wellfed.train.step.non_finite import NonFiniteLoss

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointOptions:
    """Times of checkpoints, number of kept ones, and metric of the best."""

    every_steps: int | None
    minutes: float | None
    keep_last: int
    best_metric: str
    best_mode: Literal["max", "min"]


class Checkpoints(pl.Callback):
    """Saves every n steps and every n minutes, and after each epoch if no step count is given.

    Files: ``last.ckpt``, earlier ones as ``last-1.ckpt`` and so on, ``keep_last`` in all, and ``best.ckpt`` with its
    value. A module with non-finite weights or loss is never saved.

    A step is saved after its validation, and an epoch's last step after the epoch. By then, callbacks and schedulers
    that monitor a validation have changed their state. Must come after the user's callbacks, see `users.Last`.
    """

    best_by_monitor = False
    """Whether the first validation metric that callbacks or schedulers monitor picks ``best.ckpt``."""

    def __init__(
        self,
        folder: Path,
        options: CheckpointOptions,
        metrics: Mapping[str, float],
        on_disk_error: Callable[[BaseException, int], None],
        *,
        progress: Progress | None = None,
        finite_step: Callable[[], int] = lambda: 0,
        on_saved: Callable[[int, str], None] = lambda step, name: None,
    ) -> None:
        """
        Args:
            metrics: the latest metrics by name, such as ``val/loss``.
            finite_step: returns the step up to which all losses are known to be finite.
        """
        self.files = CheckpointWriter(folder, options.keep_last, on_disk_error, on_saved)
        self._options, self._metrics = options, metrics
        self._progress = progress or Progress()
        self._finite_step, self._checked_step = finite_step, 0
        self._saved_at_s = time.monotonic()
        self._step, self._is_due, self._is_alone = 0, False, True
        self._instead: Callable[[pl.Trainer], None] | None = None
        """Function that is called instead of saving the next due checkpoint."""
        self._best_values: dict[str, float] = {}
        """Metric and value for the current file, if it is ``best.ckpt``."""
        self._compare_by(options.best_metric, options.best_mode)

    def _compare_by(self, metric: str, mode: Literal["max", "min"]) -> None:
        self.best_metric, self.best_mode = metric, mode
        self.best_value = _best_value(self.files.folder / BEST, metric)
        """Best value so far, that of a resumed run included."""

    def _is_best(self, value: float) -> bool:
        """Returns whether no earlier value is better. Of equal values the later is best, as it was trained longer."""
        if self.best_value is None or not math.isfinite(value):
            return math.isfinite(value)
        return value >= self.best_value if self.best_mode == "max" else value <= self.best_value

    # -- when to save ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._step = self._checked_step = trainer.global_step  # a loaded checkpoint was checked when it was written
        self._is_alone = trainer.world_size == 1
        trainer.fit_loop.epoch_loop.when_over = None
        last = (self.files.folder / LAST).resolve()
        if trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve() == last:
            self.files.is_last_sound, self.files.last_step = True, trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every, is_due = self._options.every_steps, False
        if every is not None:
            before, self._step = self._step, trainer.global_step  # a batch may take several optimizer steps
            is_due = self._step // every > before // every
        if is_due or self._is_time(trainer):
            self._is_due = True
            trainer.fit_loop.epoch_loop.when_over = self.save_if_due

    def _is_time(self, trainer: pl.Trainer) -> bool:
        """Returns whether the minutes are over. All ranks agree, since saving is a collective."""
        if self._options.minutes is None:
            return False
        is_time = time.monotonic() - self._saved_at_s >= 60 * self._options.minutes
        if self._is_alone:
            return is_time
        return ranks_agree_now(trainer) and bool(trainer.strategy.reduce_boolean_decision(is_time, all=False))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._is_due = self._is_due or self._options.every_steps is None

    def call_when_over(self, trainer: pl.Trainer, function: Callable[[pl.Trainer], None]) -> None:
        """Calls a function where a due checkpoint of this step is saved."""
        self._instead, self._is_due = function, True
        trainer.fit_loop.epoch_loop.when_over = self.save_if_due

    def save_if_due(self, trainer: pl.Trainer) -> None:
        """Saves if due. Called after each batch within an epoch, and before the user's callbacks begin an epoch."""
        if self._is_due and not is_within_step(trainer):
            self._is_due, trainer.fit_loop.epoch_loop.when_over = False, None
            (self._instead or self.save_last)(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not averages_weights(trainer):  # else the weights are their average by now, see `BeforeUsers`
            self.save_last(trainer)
        names = sorted(name for name in self._metrics if name.startswith("val/"))
        if self.best_value is None and names and f"val/{self.best_metric}" not in names:
            _LOG.warning(
                "There is no best.ckpt: nobody logs val/%s. Set trainer.best_metric and best_mode; there are %s.",
                self.best_metric,
                ", ".join(names),
            )

    # -- the best checkpoint --------------------------------------------------------------------------------------

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        for metric, mode in monitored(trainer) if self.best_by_monitor and not trainer.sanity_checking else ():
            if f"val/{metric}" in self._metrics:
                if (metric, mode) != (self.best_metric, self.best_mode):
                    self._compare_by(metric, mode)
                self.best_by_monitor = False  # found; stays the same from now on
                break
        value = self._metrics.get(f"val/{self.best_metric}")
        is_best = value is not None and self._is_best(value)
        if trainer.world_size > 1:  # saving is a collective, and only rank 0 has the best value
            is_best = trainer.strategy.broadcast(is_best)
        if value is not None and is_best:
            self._best_values = {self.best_metric: value}
            try:
                is_saved = self._save(trainer, BEST)
            finally:
                self._best_values = {}
            if is_saved:
                self.best_value = value

    def validated_at_end(self, value: float, step: int) -> None:
        """Copies ``last.ckpt`` to ``best.ckpt`` if a validation after training gave the best value for its weights."""
        is_best = self._is_best(value) and self.files.step_of_last() == step
        if is_best and self.files.copy_to_best({self.best_metric: value}):
            self.best_value = value

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if self._best_values:
            checkpoint[BEST_VALUES] = self._best_values

    # -- the last checkpoint --------------------------------------------------------------------------------------

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, NonFiniteLoss):
            exception.add_note(self._way_back())

    def _way_back(self) -> str:
        step = self.files.step_of_last()
        if step is None:
            return "No checkpoint had been written by then."
        return f"{LAST} of step {step} is good: go on from it with trainer.gradient_clip=1.0 or trainer.on_nan=skip."

    def save_before_end(self, trainer: pl.Trainer) -> None:
        """Saves before a stop. Non-finite weights only give a warning, so the run still ends as stopped."""
        try:
            self.save_last(trainer)
        except NonFiniteLoss as error:
            _LOG.warning("%s %s", error, self._way_back())

    def save_last(self, trainer: pl.Trainer) -> None:
        """Writes ``last.ckpt`` of the current step, unless it exists.

        Raises:
            NonFiniteLoss: weights or loss are not finite; earlier checkpoints stay.
        """
        if self.files.last_step == trainer.global_step:
            return
        self._saved_at_s = time.monotonic()
        self._save(trainer, LAST)

    def _save(self, trainer: pl.Trainer, name: str) -> bool:
        # A finite loss was computed with the weights before its step.
        check_finite(trainer, max(self._checked_step + 1, self._finite_step()))
        self._checked_step = trainer.global_step
        with self._progress.during("checkpoint"):
            return self.files.write(trainer, name)


class BeforeUsers(pl.Callback):
    """Due checkpoints of `Checkpoints`, written before the user's callbacks begin an epoch or end the training.

    At the end of training, callbacks may replace weights by their average. A resumed training must not start from it.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
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
        self._checkpoints.save_last(trainer)


def _best_value(path: Path, metric: str) -> float | None:
    """Returns the value of a ``best.ckpt``; None without one."""
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return float(state[BEST_VALUES][metric])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError):
        return None
