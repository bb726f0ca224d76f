"""Checks weights and writes checkpoint files, each beside its target and renamed, so that no file is incomplete."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from wellfed.errors import first_line
from wellfed.train.lightning.checkpoints import checkpoint_files
from wellfed.train.lightning.checkpoints.checkpoint_files import BEST, LAST
from wellfed.train.lightning.checkpoints.plain_checkpoint import save_flushed
from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, between

_LOG = logging.getLogger(__name__)
BEST_VALUES = "best"
"""Key of a checkpoint's entry with the metric that picks ``best.ckpt``, in that file alone."""


class CheckpointWriter:
    """The checkpoint files of a run: ``last.ckpt``, earlier ones as ``last-1.ckpt`` and so on, and ``best.ckpt``."""

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        on_disk_error: Callable[[BaseException, int], None],
        on_saved: Callable[[int, str], None],
    ) -> None:
        self.folder = folder
        self.failure: BaseException | None = None
        """Error of the latest save of ``last.ckpt``; None if it succeeded."""
        self.last_step = -1
        """Step of ``last.ckpt`` if this process has written or loaded it, else -1."""
        self.is_last_sound = False
        """Whether this process has written or loaded ``last.ckpt``. A damaged one is not loaded."""
        self._keep_last = keep_last
        self._on_disk_error, self._on_saved = on_disk_error, on_saved

    def write(self, trainer: pl.Trainer, name: str) -> bool:
        """Returns whether the file was written. All ranks agree, else they would not save at the same step."""
        failure: BaseException | None = None
        try:
            if trainer.is_global_zero:
                with checkpoint_files.replacing(self.folder / name) as temporary:
                    self._save(trainer, temporary)
                    if name == LAST:
                        self._rotate()
            else:
                self._save(trainer, self.folder / name)
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
            self.last_step, self.is_last_sound = trainer.global_step, True
        if is_written and trainer.is_global_zero:
            self._on_saved(trainer.global_step, name)
        return is_written

    def _save(self, trainer: pl.Trainer, path: Path) -> None:
        try:
            trainer.save_checkpoint(path)
        except (OSError, RuntimeError) as error:
            if is_disk_error(error):
                trainer.strategy.barrier("Trainer.save_checkpoint")  # the other ranks wait here for this one
            raise

    def copy_to_best(self, values: dict[str, float]) -> bool:
        """Writes ``last.ckpt`` with these values as ``best.ckpt``; returns whether it could."""
        try:
            state = torch.load(self.folder / LAST, map_location="cpu", mmap=True, weights_only=True)
            with checkpoint_files.replacing(self.folder / BEST) as temporary:
                save_flushed({**state, BEST_VALUES: values}, temporary)
        except (OSError, RuntimeError) as error:
            if not is_disk_error(error):
                raise
            self._on_disk_error(error, self.last_step)
            return False
        return True

    def step_of_last(self) -> int | None:
        """Returns the step of ``last.ckpt``; None without one."""
        if self.last_step >= 0:
            return self.last_step
        if not (self.folder / LAST).exists():
            return None
        try:  # the resumed run has written it
            return int(torch.load(self.folder / LAST, map_location="cpu", mmap=True, weights_only=True)["global_step"])
        except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            _LOG.warning("%s can't be read: %s", self.folder / LAST, error)
            return None

    def _rotate(self) -> None:
        """Renames last to last-1, last-1 to last-2 and so on; the oldest is replaced. A damaged last is not kept."""
        if not self.is_last_sound:
            return
        names = [self.folder / LAST, *(self.folder / f"last-{age}.ckpt" for age in range(1, self._keep_last))]
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
