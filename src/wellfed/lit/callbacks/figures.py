"""Hands training and evaluation figures to the journal, every n steps and after each pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl

from wellfed.lit.module import StepModule
from wellfed.step.non_finite import USUAL_CAUSES, NonFiniteLoss


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
        reduce = trainer.strategy.reduce if trainer.world_size > 1 else None
        values = module.totals.take(reduce) if isinstance(module, StepModule) else _logged(trainer, "train")
        if self.stops_on_nan and not math.isfinite(loss := values.get("loss", 0.0)):
            raise NonFiniteLoss(
                f"The training loss is {loss} within the steps {self.handed_over_step + 1} to {step}. {USUAL_CAUSES} "
                "trainer.on_nan=skip or halve_lr leave such steps out."
            )
        self.handed_over_step = step
        values["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        self._tell("train", values, trainer, self._throughput)

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.validated_step = self.step
        self._tell("val", module.evaluated() if isinstance(module, StepModule) else _logged(trainer, "val"), trainer)

    def on_test_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._tell("test", module.evaluated() if isinstance(module, StepModule) else _logged(trainer, "test"), trainer)

    def logged(self, values: Mapping[str, float]) -> None:
        """Figures that a user's LightningModule, or a callback of its, gives to its logger.

        Those that Lightning keeps under the name of a split are handed over by the hooks above, with ours.
        """
        trainer = self._trainer
        if trainer is None or trainer.sanity_checking:
            return
        found: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            split = _split_of(name)
            if name == "epoch" or (split is not None and name in trainer.callback_metrics):
                continue
            where = split or ("test" if trainer.testing else "val" if trainer.validating else "train")
            found.setdefault(where, {})[name[len(where) + 1 :] if split else name] = value
        for split, named in found.items():
            self._tell(split, named, trainer)

    def _tell(
        self,
        split: str,
        values: Mapping[str, float],
        trainer: pl.Trainer,
        throughput: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        named = {f"{split}/{name}": value for name, value in values.items()}
        self.latest.update(named)
        self.first = {**named, **self.first}
        if trainer.is_global_zero:
            beside = throughput() if throughput else None
            self._take(split, values, step=self.step, epoch=self.epoch, throughput=beside)


def _logged(trainer: pl.Trainer, split: str) -> dict[str, float]:
    """What a LightningModule has logged for a split: ``val/loss`` and ``val_loss`` are both ``loss`` of ``val``."""
    return {
        name[len(split) + 1 :].removesuffix("_step"): float(value)
        for name, value in trainer.callback_metrics.items()
        if _split_of(name) == split
    }


def _split_of(name: str) -> str | None:
    return next((split for split in ("train", "val", "test") if name.startswith((f"{split}/", f"{split}_"))), None)
