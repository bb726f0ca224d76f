"""Tells the watching threads how far training is."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from wellfed.telemetry.run_progress import Progress


class Watch(pl.Callback):
    """Keeps step and phase up to date; what a reading belongs to is looked up there, not asked here."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._progress.step = trainer.global_step
        self._progress.enter("train")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._progress.step_done(trainer.global_step)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._before = self._progress.phase
        self._progress.enter("validate")

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._progress.enter(self._before)
