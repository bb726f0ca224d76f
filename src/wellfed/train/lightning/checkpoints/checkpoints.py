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
from wellfed.train.lightning.callbacks.stop import ranks_agree_now
from wellfed.train.lightning.checkpoints.checkpoint_files import BEST, LAST
from wellfed.train.lightning.checkpoints.checkpoint_writer import BEST_VALUES, CheckpointWriter
from wellfed.train.lightning.checkpoints.finite_check import FiniteCheck
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


class BestSoFar:
    """The metric that picks ``best.ckpt``, and its best value so far, that of a resumed run included."""

    def __init__(self, folder: Path, metric: str, mode: Literal["max", "min"]) -> None:
        self.metric, self.mode = metric, mode
        self.value = _best_value(folder / BEST, metric)

    def is_reached_by(self, value: float) -> bool:
        """Returns whether no earlier value is better. Of equal values the later is best, as it was trained longer."""
        if self.value is None or not math.isfinite(value):
            return math.isfinite(value)
        return value >= self.value if self.mode == "max" else value <= self.value


class Checkpoints(pl.Callback):
    """Saves every n steps and every n minutes, and after each epoch if no step count is given.

    Files: ``last.ckpt``, earlier ones as ``last-1.ckpt`` and so on, ``keep_last`` in all, and ``best.ckpt`` with its
    value. A module with non-finite weights or loss is never saved.
    """

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
        self.best = BestSoFar(folder, options.best_metric, options.best_mode)
        self._options, self._metrics = options, metrics
        self._progress = progress or Progress()
        self._finite = FiniteCheck(finite_step)
        self._saved_at_s = time.monotonic()
        self._best_values: dict[str, float] = {}
        """Metric and value for the current file, if it is ``best.ckpt``."""
        self._is_alone = True

    # -- when to save ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._is_alone = trainer.world_size == 1
        self._finite.start(trainer)
        last = (self.files.folder / LAST).resolve()
        is_last = trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve() == last
        self.files.is_last_sound |= is_last
        if is_last:
            self.files.last_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every = self._options.every_steps
        if (every is not None and trainer.global_step % every == 0) or self._is_time(trainer):
            self.save_last(trainer)

    def _is_time(self, trainer: pl.Trainer) -> bool:
        """Returns whether the minutes are over. All ranks agree, since saving is a collective."""
        if self._options.minutes is None:
            return False
        is_time = time.monotonic() - self._saved_at_s >= 60 * self._options.minutes
        if self._is_alone:
            return is_time
        return ranks_agree_now(trainer) and bool(trainer.strategy.reduce_boolean_decision(is_time, all=False))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._options.every_steps is None:
            self.save_last(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.save_at_end(trainer)

    # -- the best checkpoint --------------------------------------------------------------------------------------

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        value = self._metrics.get(f"val/{self.best.metric}")
        is_best = value is not None and self.best.is_reached_by(value)
        if trainer.world_size > 1:  # saving is a collective, and only rank 0 has the best value
            is_best = trainer.strategy.broadcast(is_best)
        if value is not None and is_best:
            self._best_values = {self.best.metric: value}
            try:
                is_saved = self._save(trainer, BEST)
            finally:
                self._best_values = {}
            if is_saved:
                self.best.value = value

    def validated_at_end(self, value: float, step: int) -> None:
        """Copies ``last.ckpt`` to ``best.ckpt`` if a validation after training gave the best value for its weights."""
        is_best = self.best.is_reached_by(value) and self.files.step_of_last() == step
        if is_best and self.files.copy_to_best({self.best.metric: value}):
            self.best.value = value

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
            self.save_at_end(trainer)
        except NonFiniteLoss as error:
            _LOG.warning("%s %s", error, self._way_back())

    def save_at_end(self, trainer: pl.Trainer) -> None:
        """Calls `save_last`. After a failure, deletes the oldest checkpoint, which would go anyway, and retries."""
        self.save_last(trainer)
        is_missing = self.files.last_step != trainer.global_step
        if trainer.world_size > 1:
            is_missing = trainer.strategy.broadcast(is_missing)
        if not is_missing:
            return
        if trainer.is_global_zero:
            self.files.delete_oldest()
        self.save_last(trainer)

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
        self._finite.check(trainer)
        with self._progress.during("checkpoint"):
            return self.files.write(trainer, name)


def _best_value(path: Path, metric: str) -> float | None:
    """Returns the value of a ``best.ckpt``; None without one."""
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return float(state[BEST_VALUES][metric])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError):
        return None
