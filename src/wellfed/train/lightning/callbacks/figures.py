"""Writes metrics of training and evaluation to the journal, every n steps and after each pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, between

_SPLITS = ("train", "val", "test")


class Figures(pl.Callback):
    """Means of the metrics since the last row. Waits for the device once a row, never in between.

    The metrics are the totals and the evaluation of a `StepModule`, or the logged values of a user's LightningModule.
    """

    def __init__(
        self,
        take: Callable[..., None],
        *,
        every: int,
        stop_on_nan: bool,
    ) -> None:
        """``take`` is called as `Journal.metrics`."""
        self._take, self._every, self.stops_on_nan = take, every, stop_on_nan
        self.handed_over_step = 0
        """Last step whose metrics are written. With ``stop_on_nan`` all losses up to it are finite."""
        self._trainer: pl.Trainer | None = None
        self.first: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.validated_step: int | None = None
        self.step, self.epoch = 0, 0
        """Progress of training, for metrics of a later validation or test by another Trainer."""
        self._handed_over: dict[str, Any] = {}
        """Logged name -> latest written value, to recognise new values."""
        self._added: set[str] = set()
        """Names that we have added to Lightning's ``callback_metrics``."""
        self._written_at: dict[str, int] = {}
        """Metric -> step of its latest value; it is written once a step."""

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.step, self.epoch = trainer.global_step, trainer.current_epoch
        self.handed_over_step = self.step

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.step, self.epoch = trainer.global_step, trainer.current_epoch
        if self.step // self._every > self.handed_over_step // self._every:  # a batch may take several steps
            self._hand_over(trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._hand_over(trainer, module)

    def _hand_over(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = trainer.global_step
        if step == self.handed_over_step:
            return
        if isinstance(module, StepModule):
            values = module.plain.totals.take(module.mean_of_ranks)
        else:
            values = self._logged(trainer, "train")
        if self.stops_on_nan and not math.isfinite(loss := values.get("loss", 0.0)):
            raise NonFiniteLoss(
                f"The training loss is {loss} {between(self.handed_over_step + 1, step)}. {USUAL_CAUSES} "
                "trainer.on_nan=skip leaves such steps out."
            )
        self.handed_over_step = step
        values["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        self._write("train", values, trainer, has_rate=True)

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.validated_step = self.step
        if isinstance(module, StepModule):
            self._write("val", module.end_evaluation("val"), trainer)

    def on_test_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if isinstance(module, StepModule):
            self._write("test", module.end_evaluation("test"), trainer)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # The module's own hook at the epoch's end may log, and comes after ours.
        if not (isinstance(module, StepModule) or trainer.sanity_checking):
            self._write("val", self._logged(trainer, "val"), trainer)

    def on_test_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not isinstance(module, StepModule):
            self._write("test", self._logged(trainer, "test"), trainer)

    def logged(self, values: Mapping[str, float]) -> None:
        """Writes metrics that a user's LightningModule or callback passes to its logger.

        Leaves out metrics that Lightning keeps under the name of a split, which the hooks above write. Includes metrics
        that a module logs after the end of an epoch.
        """
        trainer = self._trainer
        if trainer is None or trainer.sanity_checking:
            return
        state = "test" if trainer.testing else "val" if trainer.validating else "train"
        is_in_epoch = trainer._logger_connector._first_loop_iter is not None
        found: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            if name == "epoch" or (is_in_epoch and _split_of(name) is not None and name in trainer.callback_metrics):
                continue
            split, _, rest = name_in_metrics(name, state).partition("/")
            found.setdefault(split, {})[rest] = value
        for split, named in found.items():
            self._write(split, named, trainer)
        if not is_in_epoch:
            self._handed_over.update(trainer.callback_metrics)

    def _write(self, split: str, values: Mapping[str, float], trainer: pl.Trainer, *, has_rate: bool = False) -> None:
        values = {name: value for name, value in values.items() if self._written_at.get(f"{split}/{name}") != self.step}
        named = {f"{split}/{name}": value for name, value in values.items()}
        if not named:
            return
        self._written_at.update(dict.fromkeys(named, self.step))
        self.latest.update(named)
        self.first = {**named, **self.first}
        known = trainer.callback_metrics  # read by monitors of callbacks and schedulers
        for name, value in named.items():
            if name in self._added or name not in known:
                self._added.add(name)
                known[name] = torch.tensor(value)
        if trainer.is_global_zero:
            self._take(split, values, step=self.step, epoch=self.epoch, has_rate=has_rate)

    def _logged(self, trainer: pl.Trainer, split: str) -> dict[str, float]:
        """Returns new metrics of a user's module. ``val/loss`` and ``val_loss`` are both ``loss`` of ``val``."""
        logged = trainer.callback_metrics.items()
        own = {name: value for name, value in logged if name not in self._added and _split_of(name) == split}
        # Lightning keeps the values of earlier epochs.
        new = {name: value for name, value in own.items() if value is not self._handed_over.get(name)}
        self._handed_over.update(new)
        return {name[len(split) + 1 :].removesuffix("_step"): float(value) for name, value in new.items()}


def name_in_metrics(name: str, state: str) -> str:
    """Returns the name in metrics.csv of a split's logged metric: ``val/loss`` for ``val_loss``."""
    split = _split_of(name)
    return f"{split}/{name[len(split) + 1 :]}" if split else f"{state}/{name}"


def _split_of(name: str) -> str | None:
    return next((split for split in _SPLITS if name.startswith((f"{split}/", f"{split}_"))), None)
