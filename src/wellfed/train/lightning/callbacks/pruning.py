"""Ends a training early when whoever compares it with others says so, after a validation."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl

Judge = Callable[[int, float], "str | None"]
"""Is told the number of a validation, from 1, and its figure; why training is to end, or None."""


class Pruning(pl.Callback):
    """All ranks end together. Training ends as by its own limits: nothing is raised, the last checkpoint is written."""

    def __init__(
        self,
        judge: Judge | None,
        figure: Callable[[], float | None],
        total_steps: int | None = None,
        validations: int = 0,
    ) -> None:
        """
        Args:
            judge: None = nobody judges here. Of several ranks the first decides, and the others don't know.
            figure: the latest of the metric; None where validation gives none.
            total_steps: of the whole training, which is over then whatever is said of it; None = nobody knows.
            validations: that were judged before this part of a training.
        """
        self._judge, self._figure, self._total_steps = judge, figure, total_steps
        self._validations = validations
        self.reason: str | None = None
        """Why it was ended early."""

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not (trainer.sanity_checking or self.reason):
            self._validations += 1
            self.reason = self._verdict(trainer.global_step)
            if trainer.world_size > 1:
                self.reason = trainer.strategy.broadcast(self.reason)
            if self.reason is not None:
                trainer.should_stop = True

    def _verdict(self, step: int) -> str | None:
        value = self._figure()
        if self._judge is None or value is None:
            return None
        reason = self._judge(self._validations, value)
        is_over = self._total_steps is not None and step >= self._total_steps
        return None if is_over else reason
