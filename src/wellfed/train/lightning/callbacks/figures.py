"""Hands training and evaluation figures to the journal, every n steps and after each pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl
import torch

from wellfed.train.lightning.module import StepModule
from wellfed.train.step.non_finite import USUAL_CAUSES, NonFiniteLoss, between

_SPLITS = ("train", "val", "test")


class TakesMetrics(Protocol):
    """Where figures go."""

    def __call__(
        self,
        split: str,
        values: Mapping[str, float],
        *,
        step: int,
        epoch: int,
        throughput: Mapping[str, float] | None = None,
    ) -> None: ...


class Figures(pl.Callback):
    """Means since the last row; the device is waited for once a row, never in between.

    Of a `StepModule` these are its own totals and evaluation; of a user's LightningModule what it logged.
    """

    def __init__(
        self,
        take: TakesMetrics,
        *,
        every: int,
        stop_on_nan: bool,
        throughput: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """``throughput`` is asked with each training row how fast it goes."""
        self._take, self._every, self.stops_on_nan, self._throughput = take, every, stop_on_nan, throughput
        self.handed_over_step = 0
        """The last step whose figures are out; with ``stop_on_nan`` all losses up to it were finite."""
        self._trainer: pl.Trainer | None = None
        self.first: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.validated_step: int | None = None
        self.step, self.epoch = 0, 0
        """How far training is; a validation or test by another Trainer afterwards belongs there."""
        self._handed_over: dict[str, Any] = {}
        """By the name under which it was logged: the value itself."""
        self._added: set[str] = set()
        """Names in Lightning's ``callback_metrics`` that are ours."""
        self._told_at: dict[str, int] = {}
        """The step at which a figure was handed over last; each is handed over once a step."""
        self._told_by_epochs: set[str] = set()
        """Names of figures that no logger has been given."""

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
        if not isinstance(module, StepModule):
            self._tell("train", self._never_logged(trainer), trainer)

    def _hand_over(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = trainer.global_step
        if step == self.handed_over_step:
            return
        reduce = trainer.strategy.reduce if trainer.world_size > 1 else None
        values = module.plain.totals.take(reduce) if isinstance(module, StepModule) else self._logged(trainer, "train")
        if self.stops_on_nan and not math.isfinite(loss := values.get("loss", 0.0)):
            raise NonFiniteLoss(
                f"The training loss is {loss} {between(self.handed_over_step + 1, step)}. {USUAL_CAUSES} "
                "trainer.on_nan=skip or halve_lr leave such steps out."
            )
        self.handed_over_step = step
        values["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        self._tell("train", values, trainer, self._throughput)

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.validated_step = self.step
        if isinstance(module, StepModule):
            self._tell("val", module.plain.evaluated(), trainer)

    def on_test_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if isinstance(module, StepModule):
            self._tell("test", module.plain.evaluated(), trainer)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # What it logs in its own hook at the epoch's end comes after ours.
        if not (isinstance(module, StepModule) or trainer.sanity_checking):
            self._tell("val", self._logged(trainer, "val"), trainer)

    def on_test_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not isinstance(module, StepModule):
            self._tell("test", self._logged(trainer, "test"), trainer)

    def logged(self, values: Mapping[str, float]) -> None:
        """Figures that a user's LightningModule, or a user's callback, gives to its logger.

        Those that Lightning keeps under the name of a split are handed over by the hooks above, with ours; what a
        module logs when an epoch has ended comes after them.
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
            self._tell(split, named, trainer)
        if not is_in_epoch:
            self._handed_over.update(trainer.callback_metrics)

    def _tell(
        self,
        split: str,
        values: Mapping[str, float],
        trainer: pl.Trainer,
        throughput: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        values = {name: value for name, value in values.items() if self._told_at.get(f"{split}/{name}") != self.step}
        named = {f"{split}/{name}": value for name, value in values.items()}
        if not named:
            return
        self._told_at.update(dict.fromkeys(named, self.step))
        self.latest.update(named)
        self.first = {**named, **self.first}
        known = trainer.callback_metrics  # what monitors of callbacks and schedulers find
        for name, value in named.items():
            if name in self._added or name not in known:
                self._added.add(name)
                known[name] = torch.tensor(value)
        if trainer.is_global_zero:
            beside = throughput() if throughput else None
            self._take(split, values, step=self.step, epoch=self.epoch, throughput=beside)

    def _never_logged(self, trainer: pl.Trainer) -> dict[str, float]:
        """What is logged by steps and given to no logger, since an epoch has fewer of them than Lightning waits for."""
        logged = trainer.callback_metrics
        for name in logged:
            is_one_of_several = f"{name}_step" in logged or f"{name}_epoch" in logged
            is_told = any(f"{split}/{name}" in self.latest for split in _SPLITS)
            if not (name in self._added or _split_of(name) or is_one_of_several or is_told):
                self._told_by_epochs.add(name)
        return {name: float(logged[name]) for name in self._told_by_epochs if name in logged}

    def _logged(self, trainer: pl.Trainer, split: str) -> dict[str, float]:
        """What a LightningModule has logged for a split: ``val/loss`` and ``val_loss`` are both ``loss`` of ``val``."""
        logged = trainer.callback_metrics.items()
        own = {name: value for name, value in logged if name not in self._added and _split_of(name) == split}
        # Lightning keeps the values of an epoch that is over.
        new = {name: value for name, value in own.items() if value is not self._handed_over.get(name)}
        self._handed_over.update(new)
        return {name[len(split) + 1 :].removesuffix("_step"): float(value) for name, value in new.items()}


def name_in_metrics(name: str, state: str) -> str:
    """How metrics.csv calls what is logged under a name while a split is passed over: ``val_loss`` is ``val/loss``."""
    split = _split_of(name)
    return f"{split}/{name[len(split) + 1 :]}" if split else f"{state}/{name}"


def _split_of(name: str) -> str | None:
    return next((split for split in _SPLITS if name.startswith((f"{split}/", f"{split}_"))), None)
