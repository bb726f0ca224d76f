"""Writes what a LightningModule or a callback logs to metrics.csv, every n steps and after each pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from wellfed.train.loop.figures import Figures

_SPLITS = ("train", "val", "test")


class LoggedFigures(pl.Callback):
    """Latest logged values, in `Figures`. Waits for the device once a row, never in between."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._trainer: Any = None
        self._written: dict[str, Any] = {}
        """Logged name -> latest written value, to recognise new values: Lightning keeps those of earlier epochs."""

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._figures.begin(trainer.global_step, trainer.current_epoch)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        figures = self._figures
        figures.step, figures.epoch = trainer.global_step, trainer.current_epoch
        if figures.step // figures.every > figures.handed_over_step // figures.every:  # a batch may take several steps
            self.on_train_epoch_end(trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        values = self.new("train")
        if self._figures.step == self._figures.handed_over_step:
            self._figures.write("train", values)
            return
        if trainer.optimizers:
            values["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        self._figures.trained(values)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._figures.write("val", self.new("val"))

    def on_test_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._figures.write("test", self.new("test"))

    def logged(self, values: Mapping[str, float]) -> None:
        """Writes metrics that Lightning, the module or a callback passes to a logger. Each is written once a step."""
        trainer = self._trainer
        if trainer is None or trainer.sanity_checking:
            return
        state = "test" if trainer.testing else "val" if trainer.validating else "train"
        for name, value in values.items():
            if name != "epoch" and (state == "train" or "_step" not in name):  # else one batch of an evaluation
                split, _, rest = name_in_metrics(name, state).partition("/")
                self._figures.write(split, {rest.removesuffix("_step"): value})
                self._written[name] = trainer.callback_metrics.get(name)

    def new(self, split: str) -> dict[str, float]:
        """Returns new metrics of a split: ``val/loss`` and ``val_loss`` are both ``loss`` of ``val``."""
        found = {}
        for name, value in self._trainer.callback_metrics.items():
            dotted = name_in_metrics(name, "")
            if dotted.startswith(f"{split}/") and value is not self._written.get(name):
                self._written[name] = value
                found[dotted.partition("/")[2].removesuffix("_step")] = value
        return {name: float(value) for name, value in found.items()}


def name_in_metrics(name: str, state: str) -> str:
    """Returns the name in metrics.csv of a metric that was logged in a state: ``val/loss`` for ``val_loss``."""
    split = next((one for one in _SPLITS if name.startswith((f"{one}/", f"{one}_"))), None)
    return f"{state}/{name}" if split is None else f"{split}/{name[len(split) + 1 :]}"


def monitored(trainer: pl.Trainer) -> tuple[str, Literal["max", "min"]] | None:
    """Returns name, without ``val/``, and direction of the first metric of validation that is monitored, if any."""
    found: list[tuple[Any, Any]] = [
        (getattr(one, "monitor", None), getattr(one, "mode", "min"))
        for one in sorted(trainer.callbacks, key=lambda one: isinstance(one, EarlyStopping))
        if isinstance(one, (EarlyStopping, Checkpoint))
    ]
    found += [(one.monitor, one.scheduler.mode) for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
    named = ((name_in_metrics(monitor, "val"), mode) for monitor, mode in found if monitor)
    return next(((name.removeprefix("val/"), mode) for name, mode in named if name.startswith("val/")), None)
