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
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from wellfed.errors import first_line
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.train.checkpoint_values import load, readable, save
from wellfed.train.guest.checkpoint_io import CheckedHooks
from wellfed.train.lightning.callbacks.clock import is_within_step
from wellfed.train.lightning.callbacks.stop import ranks_agree_now
from wellfed.train.lightning.callbacks.users import averages_weights, monitored
from wellfed.train.lightning.checkpoints.checkpoint_files import BEST, LAST, replacing
from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, between

_LOG = logging.getLogger(__name__)
BEST_VALUES = "best"
"""Key of a checkpoint's entry with the metric that picks ``best.ckpt``, in that file alone."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Times of checkpoints, number of kept ones, and metric of the best."""

    every_steps: int | None
    minutes: float | None
    keep_last: int
    best_metric: str
    best_mode: Literal["max", "min"]
    trusted: bool = False
    """Whether files may hold pickled objects, see `trainer.trusted_checkpoints`."""


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
        self.folder = folder
        self.failure: BaseException | None = None
        """Error of the latest save of ``last.ckpt``; None if it succeeded."""
        self.last_step: int | None = None
        """Step of ``last.ckpt`` if this process has written or loaded it, else None."""
        self._on_disk_error, self._on_saved = on_disk_error, on_saved
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
        self.best_value = _best_value(self.folder / BEST, metric, trusted=self._options.trusted)
        """Best value so far, that of a resumed run included."""

    def _is_best(self, value: float) -> bool:
        """Returns whether no earlier value is better. Of equal values the later is best, as it was trained longer."""
        if self.best_value is None or not math.isfinite(value):
            return math.isfinite(value)
        return value >= self.best_value if self.best_mode == "max" else value <= self.best_value

    # -- when to save ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if not self._options.trusted:
            CheckedHooks().on_train_start(trainer, module)
        self._step = self._checked_step = trainer.global_step  # a loaded checkpoint was checked when it was written
        self._is_alone = trainer.world_size == 1
        trainer.fit_loop.epoch_loop.when_over = None
        last = (self.folder / LAST).resolve()
        if trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve() == last:
            self.last_step = trainer.global_step

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
        if self.last_step != step or not self._is_best(value):
            return
        try:
            state = {**load(self.folder / LAST, trusted=self._options.trusted), BEST_VALUES: {self.best_metric: value}}
            with replacing(self.folder / BEST) as temporary:
                save(state if self._options.trusted else readable(state)[0], temporary)
        except (OSError, RuntimeError) as error:
            if not is_disk_error(error):
                raise
            self._on_disk_error(error, step)
        else:
            self.best_value = value

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if self._best_values:
            checkpoint[BEST_VALUES] = self._best_values

    # -- the last checkpoint --------------------------------------------------------------------------------------

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, NonFiniteLoss):
            exception.add_note(self._way_back())

    def _way_back(self) -> str:
        if self.last_step is None:
            return "No checkpoint had been written by then."
        ways = "trainer.gradient_clip=1.0 or trainer.on_nan=skip"
        return f"{LAST} of step {self.last_step} is good: go on from it with {ways}."

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
        if self.last_step == trainer.global_step:
            return
        self._saved_at_s = time.monotonic()
        self._save(trainer, LAST)

    def _save(self, trainer: pl.Trainer, name: str) -> bool:
        # A finite loss was computed with the weights before its step.
        check_finite(trainer, max(self._checked_step + 1, self._finite_step()))
        self._checked_step = trainer.global_step
        with self._progress.during("checkpoint"):
            return self._write(trainer, name)

    def _write(self, trainer: pl.Trainer, name: str) -> bool:
        """Returns whether the file was written. All ranks agree, else they would not save at the same step."""
        failure: BaseException | None = None
        try:
            if trainer.is_global_zero:
                with replacing(self.folder / name) as temporary:
                    self._save_file(trainer, temporary)
                    if name == LAST:
                        self._rotate()
            else:
                self._save_file(trainer, self.folder / name)
        except (OSError, RuntimeError) as error:
            if not is_disk_error(error):
                raise
            failure = error
            self._on_disk_error(error, trainer.global_step)
        if name == LAST:
            self.failure = failure
            if failure is not None:
                _LOG.warning(
                    "%s of step %d can't be written: %s. Earlier checkpoints are kept. Free space on the disk: the "
                    "next checkpoint tries again.",
                    *(self.folder / LAST, trainer.global_step, first_line(failure)),
                )
        is_written: bool = failure is None
        if trainer.world_size > 1:
            is_written = trainer.strategy.broadcast(is_written)
        if is_written and name == LAST:
            self.last_step = trainer.global_step
        if is_written and trainer.is_global_zero:
            self._on_saved(trainer.global_step, name)
        return is_written

    def _save_file(self, trainer: pl.Trainer, path: Path) -> None:
        try:
            trainer.save_checkpoint(path)
        except (OSError, RuntimeError) as error:
            if is_disk_error(error):
                trainer.strategy.barrier("Trainer.save_checkpoint")  # the other ranks wait here for this one
            raise

    def _rotate(self) -> None:
        """Renames last to last-1, last-1 to last-2 and so on; the oldest is replaced. One that this
        process has neither written nor loaded may be damaged, and is not kept."""
        if self.last_step is None:
            return
        names = [self.folder / LAST, *(self.folder / f"last-{age}.ckpt" for age in range(1, self._options.keep_last))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                newer.replace(older)


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


def _best_value(path: Path, metric: str, *, trusted: bool) -> float | None:
    """Returns the value of a ``best.ckpt``; None without one."""
    try:
        return float(load(path, trusted=trusted)[BEST_VALUES][metric])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError):
        return None


def is_disk_error(error: BaseException) -> bool:
    """Returns whether a save failed because a file can't be written. torch's writer hides the errno."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) or "PytorchStreamWriter failed" in str(seen) or "inline_container" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def check_finite(trainer: pl.Trainer, first: int) -> None:
    """Raises NonFiniteLoss on all ranks if weights or losses of one are not finite. Waits for the device.

    Args:
        first: first step that may have changed them, for the message.
    """
    is_good = is_finite(trainer.lightning_module)
    if trainer.world_size > 1:
        is_good = trainer.strategy.reduce_boolean_decision(is_good, all=True)
    if not is_good:
        raise NonFiniteLoss(
            f"The training loss or a weight became NaN or infinite {between(first, trainer.global_step)}; they are not "
            f"saved. {USUAL_CAUSES} trainer.on_nan=skip leaves out steps whose loss is NaN or infinite."
        )


def is_finite(module: pl.LightningModule) -> bool:
    """Returns whether trained weights and losses since the last row are finite on this rank. Waits once."""
    trained = (weight for weight in module.parameters() if weight.requires_grad and not is_lazy(weight))
    weights = [weight.detach() for weight in trained if weight.numel()]
    largest = [get_total_norm(weights, norm_type=math.inf)] if weights else []  # NaN if any is
    losses = [module.plain.totals.state_dict()["sums"].get("loss")] if isinstance(module, StepModule) else []
    found = [value.reshape(()).float().to(module.device) for value in [*largest, *losses] if value is not None]
    return not found or bool(torch.isfinite(torch.stack(found)).all())
