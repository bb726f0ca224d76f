"""Keeps ``last.ckpt``, earlier ones, and ``best.ckpt``. Only at the last save does a disk error end a run."""

from __future__ import annotations

import json
import logging
import math
import pickle
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from wellfed.observe.telemetry.run_progress import Progress
from wellfed.train.lightning.callbacks.stop import AGREE_EVERY_STEPS
from wellfed.train.lightning.checkpoints import checkpoint_trailer
from wellfed.train.lightning.checkpoints.plain_checkpoint import FACTS
from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, between

_LOG = logging.getLogger(__name__)
LAST, BEST = "last.ckpt", "best.ckpt"
_EARLIER_BEST_VALUE = "best.json"
"""File in which earlier versions kept the value of ``best.ckpt``."""


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
    value in its trailer. Each is written beside its target and renamed, so no file is incomplete. A module with
    non-finite weights or loss is never saved.
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
        self.folder, self._options, self._metrics = folder, options, metrics
        self.best_metric, self.best_mode = options.best_metric, options.best_mode
        self._on_disk_error, self._on_saved = on_disk_error, on_saved
        self._progress = progress or Progress()
        self._saved_at_s, self._saved_step = time.monotonic(), -1
        self._finite_step, self._checked_step = finite_step, 0
        self._facts: dict[str, Any] = {}
        """Facts for the trailer of the current file."""
        self.saved: dict[str, int] = {}
        """File name -> step, for files written by this process."""
        self.failure: BaseException | None = None
        """Error of the latest save of ``last.ckpt``; None if it succeeded."""
        self._unset: frozenset[str] = frozenset()
        self._is_alone = True
        self.best_value = self._read_best()

    # -- when to save ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._is_alone = trainer.world_size == 1
        self._unset = unset_buffers(trainer.lightning_module)
        self._checked_step = trainer.global_step  # a loaded checkpoint was checked when it was written
        if trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve() == (self.folder / LAST).resolve():
            self._saved_step = trainer.global_step

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
        is_turn = trainer.global_step % AGREE_EVERY_STEPS == 0
        return is_turn and bool(trainer.strategy.reduce_boolean_decision(is_time, all=False))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._options.every_steps is None:
            self.save_last(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.save_at_end(trainer)

    # -- the best checkpoint --------------------------------------------------------------------------------------

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        value = self._metrics.get(f"val/{self.best_metric}")
        is_best = value is not None and self._is_best(value)
        if trainer.world_size > 1:  # saving is a collective, and only rank 0 has the best value
            is_best = trainer.strategy.broadcast(is_best)
        if value is not None and is_best:
            self._facts = {"best": {self.best_metric: value}}
            try:
                is_saved = self._save(trainer, BEST)
            finally:
                self._facts = {}
            if is_saved:
                self.best_value = value

    def validated_at_end(self, value: float, step: int) -> None:
        """Copies ``last.ckpt`` to ``best.ckpt`` if a validation after training gave the best value for its weights."""
        if self._is_best(value) and self._step_of_last() == step:
            facts = {"best": {self.best_metric: value}}
            try:
                checkpoint_trailer.copy(self.folder / LAST, self.folder / BEST, facts)
            except OSError as error:
                self._on_disk_error(error, self._saved_step)
            else:
                self.best_value = value

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if self._facts:
            checkpoint[FACTS] = self._facts

    def _read_best(self) -> float | None:
        """Returns the best value of the run that is resumed in this folder."""
        try:
            facts = checkpoint_trailer.facts_of(self.folder / BEST)
            if facts is None:  # written by an earlier version
                values = json.loads((self.folder / _EARLIER_BEST_VALUE).read_text(encoding="utf-8"))
            else:
                values = facts["best"]
            return float(values[self.best_metric])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _is_best(self, value: float) -> bool:
        """Returns whether no earlier value is better. Of equal values the later is best, as it was trained longer."""
        if self.best_value is None or not math.isfinite(value):
            return math.isfinite(value)
        return value >= self.best_value if self.best_mode == "max" else value <= self.best_value

    # -- the last checkpoint --------------------------------------------------------------------------------------

    def _step_of_last(self) -> int | None:
        """Returns the step of ``last.ckpt``; None without one."""
        if self._saved_step >= 0:
            return self._saved_step
        if not (self.folder / LAST).exists():
            return None
        try:  # the resumed run has written it
            return int(torch.load(self.folder / LAST, map_location="cpu", mmap=True, weights_only=True)["global_step"])
        except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            _LOG.warning("%s can't be read: %s", self.folder / LAST, error)
            return None

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, NonFiniteLoss):
            exception.add_note(self._way_back())

    def _way_back(self) -> str:
        step = self._step_of_last()
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
        is_missing = self._saved_step != trainer.global_step
        if trainer.world_size > 1:
            is_missing = trainer.strategy.broadcast(is_missing)
        if not is_missing:
            return
        if trainer.is_global_zero and self._options.keep_last > 1:
            with suppress(OSError):
                (self.folder / f"last-{self._options.keep_last - 1}.ckpt").unlink(missing_ok=True)
        self.save_last(trainer)

    def save_last(self, trainer: pl.Trainer) -> None:
        """Writes ``last.ckpt`` of the current step, unless it exists.

        Raises:
            NonFiniteLoss: weights or loss are not finite; earlier checkpoints stay.
        """
        if self._saved_step == trainer.global_step:
            return
        self._saved_at_s = time.monotonic()
        if self._save(trainer, LAST):
            self._saved_step = trainer.global_step

    # -- writing --------------------------------------------------------------------------------------------------

    def _check_finite(self, trainer: pl.Trainer) -> None:
        """Raises NonFiniteLoss on all ranks if weights or loss of one are not finite. Waits for the device."""
        step, is_good = trainer.global_step, is_finite(trainer.lightning_module, self._unset)
        if trainer.world_size > 1:
            is_good = trainer.strategy.reduce_boolean_decision(is_good, all=True)
        if not is_good:
            # A finite loss was computed with the weights before its step.
            raise NonFiniteLoss(no_longer_finite(max(self._checked_step + 1, self._finite_step()), step))
        self._checked_step = step

    def _save(self, trainer: pl.Trainer, name: str) -> bool:
        self._check_finite(trainer)
        with self._progress.during("checkpoint"):
            return self._write(trainer, name)

    def _write(self, trainer: pl.Trainer, name: str) -> bool:
        """Returns whether the file was written. All ranks agree, else they would not save at the same step."""
        temporary, failure = self.folder / f".{name}.tmp", None
        try:
            trainer.save_checkpoint(temporary)
        except (OSError, RuntimeError) as error:
            if not is_disk_error(error):
                raise
            failure = error
            trainer.strategy.barrier("Trainer.save_checkpoint")  # the other ranks wait here for this one
        if trainer.is_global_zero:
            failure = failure or self._rename(temporary, name)
            if failure is not None:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
        if name == LAST:
            self.failure = failure
        if failure is not None:
            self._on_disk_error(failure, trainer.global_step)
        is_written: bool = failure is None
        if trainer.world_size > 1:
            is_written = trainer.strategy.broadcast(is_written)
        if is_written:
            self.saved[name] = trainer.global_step
        if is_written and trainer.is_global_zero:
            self._on_saved(trainer.global_step, name)
        return is_written

    def _rename(self, temporary: Path, name: str) -> OSError | None:
        """Renames the file to its final name; returns the error if that fails."""
        try:
            if name == LAST:
                self._rotate()
            checkpoint_trailer.replace(temporary, self.folder / name)
        except OSError as error:
            return error
        return None

    def _rotate(self) -> None:
        """Renames last to last-1, last-1 to last-2 and so on; the oldest is replaced."""
        keep = self._options.keep_last
        names = [self.folder / LAST, *(self.folder / f"last-{age}.ckpt" for age in range(1, keep))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                newer.replace(older)


def is_disk_error(error: BaseException) -> bool:
    """Returns whether a save failed because a file can't be written. torch's writer hides the errno."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) or "PytorchStreamWriter failed" in str(seen) or "inline_container" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def is_finite(module: pl.LightningModule, unset: Collection[str] = ()) -> bool:
    """Returns whether weights and losses since the last row are finite on this rank. Waits for the device once.

    Buffers may be infinite, as masks are, but not NaN. Buffers in ``unset`` may be NaN.
    """
    trained = (weight for weight in module.parameters() if weight.requires_grad and not is_lazy(weight))
    weights = [weight.detach() for weight in trained if weight.numel()]
    largest = [get_total_norm(weights, norm_type=math.inf)] if weights else []  # NaN if any is
    if buffers := [buffer for name, buffer in _floats(module) if name not in unset]:
        largest.append(get_total_norm(buffers, math.inf).nan_to_num(nan=math.nan, posinf=0.0))
    losses = [module.plain.totals.state_dict()["sums"].get("loss")] if isinstance(module, StepModule) else []
    found = [value.reshape(()).float().to(module.device) for value in [*largest, *losses] if value is not None]
    return not found or bool(torch.isfinite(torch.stack(found)).all())


def _floats(module: pl.LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers of floating point, by name."""
    for name, buffer in module.named_buffers():
        if not is_lazy(buffer) and buffer.is_floating_point() and buffer.numel() and not buffer.is_sparse:
            yield name, buffer


def unset_buffers(module: pl.LightningModule) -> frozenset[str]:
    """Returns the names of buffers that are NaN before training, which marks them as empty."""
    return frozenset(name for name, buffer in _floats(module) if bool(buffer.isnan().any()))


def no_longer_finite(first: int, last: int) -> str:
    """Returns the message for weights or a loss that are not finite after the step ``last``."""
    return (
        f"The training loss, a weight or a buffer became NaN or infinite {between(first, last)}; they are not saved. "
        f"{USUAL_CAUSES} trainer.on_nan=skip leaves out steps whose loss is NaN or infinite."
    )
