"""Keeps ``last.ckpt``, earlier ones, and ``best.ckpt``. Only at the last save does a disk error end a run."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from wellfed.config.schema import TrainerConfig
from wellfed.errors import LastSaveFailed, first_line
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.train.checkpoint_values import load
from wellfed.train.loop.checkpoint_files import BEST, LAST
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, between

_LOG = logging.getLogger(__name__)
BEST_VALUES = "best"
"""Key of a checkpoint's entry with the metric that picks ``best.ckpt``, in that file alone."""


class Checkpoints:
    """Files: ``last.ckpt``, earlier ones as ``last-1.ckpt`` and so on, ``keep_last`` in all, and ``best.ckpt`` with its
    value."""

    _write: Callable[[Path, Mapping[str, Any]], None]
    _broadcast: Callable[[bool], bool]
    _is_first: bool

    def __init__(
        self,
        folder: Path,
        trainer: TrainerConfig,
        best_metric: str,
        best_mode: Literal["max", "min"],
        on_disk_error: Callable[[BaseException, int], None],
        *,
        progress: Progress | None = None,
        on_saved: Callable[[int, str], None] = lambda step, name: None,
    ) -> None:
        """
        Args:
            trainer: when to save, and how many files are kept.
            on_disk_error: called with the error of a save, and its step.
            on_saved: called on rank 0 with step and name of each written file.
        """
        self.folder, self._keep_last = folder, trainer.keep_last
        self.every_steps, self.minutes = trainer.checkpoint_every_steps, trainer.checkpoint_minutes
        self.is_trusted = trainer.trusted_checkpoints
        """Whether files may hold pickled objects."""
        self.failures: dict[str, LastSaveFailed] = {}
        """Errors by name of the files whose latest save failed."""
        self.last_step: int | None = None
        """Step of ``last.ckpt`` if this process has written or loaded it, else None."""
        self._on_disk_error, self._on_saved = on_disk_error, on_saved
        self._progress = progress or Progress()
        self.compare_by(best_metric, best_mode)

    def begin(
        self, write: Callable[[Path, Mapping[str, Any]], None], broadcast: Callable[[bool], bool], rank: int
    ) -> None:
        """Sets what the present training saves by, on all ranks alike.

        Args:
            write: writes the state with more entries on rank 0.
            broadcast: returns the flag of rank 0.
        """
        self._write, self._broadcast, self._is_first = write, broadcast, rank == 0

    def compare_by(self, metric: str, mode: Literal["max", "min"]) -> None:
        """Picks the best by this metric from now on."""
        self.best_metric, self.best_mode = metric, mode
        self.best_value: float | None = None
        """Best value so far, that of a resumed run included."""
        with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError):  # there is none
            self.best_value = float(load(self.folder / BEST, trusted=self.is_trusted)[BEST_VALUES][metric])

    def loaded(self, checkpoint: Path, step: int) -> None:
        """Notes on all ranks that training goes on from a file."""
        if self._broadcast(checkpoint.resolve() == (self.folder / LAST).resolve()):
            self.last_step = step

    def is_best(self, value: float | None) -> bool:
        """Returns whether no earlier value is better. Of equal values the later is best, as it was trained longer."""
        if value is None or self.best_value is None or not math.isfinite(value):
            return value is not None and math.isfinite(value)
        return value >= self.best_value if self.best_mode == "max" else value <= self.best_value

    def save_best(self, value: float, step: int) -> None:
        """Writes ``best.ckpt`` of the current step; ``value`` of its metric is known on rank 0."""
        self.best_value = value  # of a failed save, too: no lesser one is the best
        self._save(step, BEST, {BEST_VALUES: {self.best_metric: value}})

    def save_last(self, step: int) -> None:
        """Writes ``last.ckpt`` of the current step, unless it exists."""
        if self.last_step != step and self._save(step, LAST, {}):
            self.last_step = step

    def warn_without_best(self, metrics: Iterable[str]) -> None:
        """Warns at the end of training if validations did not give the metric of the best."""
        names = sorted(name for name in metrics if name.startswith("val/"))
        if self.best_value is None and names and f"val/{self.best_metric}" not in names:
            _LOG.warning(
                "There is no best.ckpt: nobody logs val/%s. Set trainer.best_metric and best_mode; there are %s.",
                self.best_metric,
                ", ".join(names),
            )

    def way_back(self) -> str:
        """Returns text that names the last good checkpoint, for the end of a message about NaN."""
        if self.last_step is None:
            return "No checkpoint had been written by then."
        return f"{LAST} of step {self.last_step} is good: go on from it, as with trainer.gradient_clip=1.0."

    def _save(self, step: int, name: str, more: Mapping[str, Any]) -> bool:
        """Returns whether the file was written. All ranks agree, else they would not save at the same step."""
        path, written = self.folder / name, self.folder / f".{name}.tmp"
        self.failures.pop(name, None)
        with self._progress.during("checkpoint"):
            try:
                self._write(written, more)
                if self._is_first:
                    if name == LAST:
                        self._rotate()
                    written.replace(path)
            except (OSError, RuntimeError) as error:
                if not is_disk_error(error):
                    raise
                self.failures[name] = LastSaveFailed(step, path, error)
                self._on_disk_error(error, step)
                _LOG.warning(
                    "%s of step %d can't be written: %s. Earlier checkpoints are kept. Free space on the disk: the "
                    "next checkpoint tries again.",
                    *(path, step, first_line(error)),
                )
            finally:
                if self._is_first:
                    with suppress(OSError):
                        written.unlink(missing_ok=True)
            is_written = bool(self._broadcast(name not in self.failures))
        if is_written and self._is_first:
            self._on_saved(step, name)
        return is_written

    def _rotate(self) -> None:
        """Renames last to last-1, last-1 to last-2 and so on; the oldest is replaced. One that this
        process has neither written nor loaded may be damaged, and is not kept."""
        if self.last_step is None:
            return
        names = [self.folder / LAST, *(self.folder / f"last-{age}.ckpt" for age in range(1, self._keep_last))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                newer.replace(older)


def is_disk_error(error: BaseException) -> bool:
    """Returns whether a save failed because a file can't be written. torch's writer hides the errno."""
    return isinstance(error, OSError) or any(name in str(error) for name in ("PytorchStreamWriter", "inline_container"))


def non_finite(first: int, last: int) -> NonFiniteLoss:
    """Returns the error for weights or losses that became NaN or infinite within these steps."""
    return NonFiniteLoss(
        f"The training loss or a weight became NaN or infinite {between(first, last)}; they are not saved. "
        f"{USUAL_CAUSES} trainer.on_nan=skip leaves out such steps, a LightningModule by None from training_step."
    )


def is_finite(module: nn.Module, device: torch.device, losses: Iterable[Tensor] = ()) -> bool:
    """Returns whether trained weights and these losses are finite on this rank. Waits for the device once."""
    trained = (weight for weight in module.parameters() if weight.requires_grad and not is_lazy(weight))
    weights = [weight.detach() for weight in trained if weight.numel()]
    largest = [get_total_norm(weights, norm_type=math.inf)] if weights else []  # NaN if any is
    found = [value.reshape(()).float().to(device) for value in [*largest, *losses]]
    return not found or bool(torch.isfinite(torch.stack(found)).all())
