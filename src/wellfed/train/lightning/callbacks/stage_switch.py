"""Begins each of ``memory.stages`` at its first epoch, and finds the stage of a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl

from wellfed.contract import Datasets, FeatureModeName
from wellfed.record import OnEvent
from wellfed.train.lightning.module import StepModule
from wellfed.train.step.feature_table import FeatureStage


class FeatureStages(pl.Callback):
    """Switch between stages. Must come before callbacks that draw random numbers at the start of an epoch.

    State: the number of the stage, which only rises.
    """

    def __init__(
        self, stages: Sequence[FeatureStage], data_for: Callable[[FeatureModeName], Datasets], on_event: OnEvent
    ) -> None:
        """
        Args:
            stages: stages in the order of their epochs; training is set up for the first.
            data_for: returns the data for a mode, which loaders read from the next epoch on.
        """
        self._stages, self._data_for, self._on_event = stages, data_for, on_event
        self._number = 0

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Begins the stage of the last trained batch, before the optimizer's state is loaded.

        Between two epochs the stage of the next one has not begun yet.
        """
        if trainer.state.fn == "fit":
            self._begin(module, checkpoint.get("position", {}).get("epoch", 0))

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch
        if (facts := self._begin(module, epoch)) is not None:
            self._on_event("stage", step=trainer.global_step, epoch=epoch, **facts)

    def _begin(self, module: pl.LightningModule, epoch: int) -> dict[str, Any] | None:
        """Begins the stage of this epoch; returns the facts of the change, or None without one."""
        number = sum(stage.from_epoch <= epoch for stage in self._stages) - 1
        if number <= self._number:
            return None
        assert isinstance(module, StepModule)
        self._number, stage = number, self._stages[number]
        data = self._data_for(stage.mode)
        return module.begin_stage(stage, data.train, {"val": data.val, "test": data.test})
