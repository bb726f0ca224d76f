"""Writes what a LightningModule or a callback logs to metrics.csv, every n steps and after each pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from wellfed.train.loop.figures import Figures

_SPLITS = ("train", "val", "test")


class LoggedFigures(pl.Callback):
    """Latest logged values, in `Figures`. Waits for the device once a row, never in between."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._trainer: pl.Trainer | None = None
        self._written: dict[str, Any] = {}
        """Logged name -> latest written value, to recognise new values: Lightning keeps those of earlier epochs."""
        self._added: set[str] = set()
        """Names that are in Lightning's ``callback_metrics`` because of this callback."""

    @property
    def of_validation(self) -> list[str]:
        """Names of the metrics of validation that Lightning has, without ``val/``."""
        known = () if self._trainer is None else self._trainer.callback_metrics
        named = (name_in_metrics(name, "val") for name in known)
        return [name.removeprefix("val/") for name in named if name.startswith("val/")]

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
        if self._figures.step == self._figures.handed_over_step:
            return
        values = self._new(trainer, "train")
        if trainer.optimizers:
            values["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        self._figures.trained(values)
        self._make_known(trainer, "train", values)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer, "val", self._new(trainer, "val"))

    def on_test_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._write(trainer, "test", self._new(trainer, "test"))

    def logged(self, values: Mapping[str, float]) -> None:
        """Writes metrics that Lightning, the module or a callback passes to a logger. Each is written once a step."""
        trainer = self._trainer
        if trainer is None or trainer.sanity_checking:
            return
        state = "test" if trainer.testing else "val" if trainer.validating else "train"
        found: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            if name == "epoch" or (state != "train" and "_step" in name):  # one batch of an evaluation
                continue
            split, _, rest = name_in_metrics(name, state).partition("/")
            found.setdefault(split, {})[rest.removesuffix("_step")] = value
        known = trainer.callback_metrics
        self._written.update({name: known[name] for name in values if name in known})
        for split, named in found.items():
            self._write(trainer, split, named)

    def _write(self, trainer: pl.Trainer, split: str, values: Mapping[str, float]) -> None:
        self._figures.write(split, values)
        self._make_known(trainer, split, values)

    def _make_known(self, trainer: pl.Trainer, split: str, values: Mapping[str, float]) -> None:
        """Adds metrics under their names in metrics.csv, which monitors of callbacks and schedulers may use."""
        known = trainer.callback_metrics
        for name, value in values.items():
            if (dotted := f"{split}/{name}") in self._added or dotted not in known:
                self._added.add(dotted)
                known[dotted] = torch.tensor(value)

    def _new(self, trainer: pl.Trainer, split: str) -> dict[str, float]:
        """Returns new metrics of a split. ``val/loss`` and ``val_loss`` are both ``loss`` of ``val``."""
        new = {
            name: value
            for name, value in trainer.callback_metrics.items()
            if name not in self._added and _split_of(name) == split and value is not self._written.get(name)
        }
        self._written.update(new)
        return {name[len(split) + 1 :].removesuffix("_step"): float(value) for name, value in new.items()}


def name_in_metrics(name: str, state: str) -> str:
    """Returns the name in metrics.csv of a split's logged metric: ``val/loss`` for ``val_loss``."""
    split = _split_of(name)
    return f"{split}/{name[len(split) + 1 :]}" if split else f"{state}/{name}"


def _split_of(name: str) -> str | None:
    return next((split for split in _SPLITS if name.startswith((f"{split}/", f"{split}_"))), None)


def monitored(trainer: pl.Trainer) -> tuple[str, Literal["max", "min"]] | None:
    """Returns name, without ``val/``, and direction of the first metric of validation that is monitored, if any."""
    found: list[tuple[Any, Any]] = [
        (getattr(one, "monitor", None), getattr(one, "mode", "min"))
        for one in trainer.callbacks
        if isinstance(one, (EarlyStopping, Checkpoint))
    ]
    found += [(one.monitor, one.scheduler.mode) for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
    named = ((name_in_metrics(monitor, "val"), mode) for monitor, mode in found if monitor)
    return next(((name.removeprefix("val/"), mode) for name, mode in named if name.startswith("val/")), None)
