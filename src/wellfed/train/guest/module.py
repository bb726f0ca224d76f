"""Wraps a plain model in a LightningModule, where a LightningDataModule or a callback of Lightning comes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from wellfed.batches import Delivery
from wellfed.contract import Batch, FeatureSource
from wellfed.record.entries import OnEvent
from wellfed.train.guest.marks import latest_of, samples_of
from wellfed.train.memory.features import FeatureTable
from wellfed.train.plain_model.split_metrics import SplitMetrics
from wellfed.train.step.loss import Loss
from wellfed.train.step.micro_batches import Preparation


class PlainModule(pl.LightningModule):
    """A model with ``loss(batch)`` (see `wellfed.contract`). It logs its loss and metrics as ``train/``, ``val/``..."""

    def __init__(
        self,
        model: nn.Module,
        prepare: Mapping[str, Preparation],
        metrics: SplitMetrics,
        optimizers: Callable[[], dict[str, Any]],
        features: FeatureTable | None,
        on_event: OnEvent,
    ) -> None:
        """
        Args:
            prepare: data of evaluation by split.
            optimizers: returns what ``configure_optimizers`` returns.
        """
        super().__init__()
        self.model, self._prepare, self._metrics, self._optimizers = model, prepare, metrics, optimizers
        self._features, self._on_event = features, on_event
        self._loss = Loss(model)
        self._source: FeatureSource | None = None

    @property
    def best_of_validation(self) -> tuple[str, str]:
        """Name and direction of the metric that picks the best checkpoint."""
        return self._metrics.best_metric, self._metrics.best_mode

    def artifacts_of_test(self, folder: Path) -> dict[str, Path]:
        """Returns the files that the workload's evaluation writes."""
        return self._metrics.artifacts(folder)

    def configure_optimizers(self) -> dict[str, Any]:
        return self._optimizers()

    def on_fit_start(self) -> None:
        if self._features is not None:
            self._features.hold(self.model, self.device, self._on_event)
            self._source = self._features.source

    on_validation_start = on_test_start = on_fit_start

    def _prepared(self, split: str, batch: Batch, number: int) -> Batch:
        if self._source is None:
            PlainModule.on_fit_start(self)  # a timed training calls no hooks
        epoch = part = 0  # of an evaluation, whose draws are the same each time
        if split == "train":
            epoch = self.current_epoch
            if (latest := latest_of(self.trainer)) is not None:
                epoch, number = latest.epoch, latest.index
            number, part = divmod(number, self.trainer.accumulate_grad_batches)
        return self._prepare[split](batch, Delivery(batch, epoch, number, 0), part, self._source)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self._loss(self._prepared("train", batch, batch_idx))
        for name, value in {**output.metrics, "loss": output.loss}.items():
            self.log(f"train/{name}", value.detach(), batch_size=samples_of(batch))
        return output.loss

    def on_validation_epoch_start(self) -> None:
        self._metrics.reset()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        split = "test" if self.trainer.testing else "val"
        weight = self._prepare[split].weight(batch, samples_of(batch)) if self._metrics.takes_loss else 0
        self._metrics.update(self._prepared(split, batch, batch_idx), weight, self._source)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        split = "test" if self.trainer.testing else "val"
        self.log_dict({f"{split}/{name}": torch.tensor(value) for name, value in self._metrics.compute().items()})

    on_test_epoch_end = on_validation_epoch_end
