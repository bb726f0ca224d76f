"""Ends a training that is only timed as soon as its rate is known well enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from wellfed.timing.interval import MIN_STEPS
from wellfed.timing.readiness import StepSummary


class StopWhenMeasured(pl.Callback):
    """Must stand behind `Clock`. With several ranks, which would have to agree, all the steps are run.

    Args:
        summary: the figures of the steps so far.
        within: half the 95 % interval of samples/s over the rate, at which it is known well enough.
    """

    def __init__(self, summary: Callable[[], StepSummary | None], within: float) -> None:
        self._summary, self._within = summary, within
        self._next_look = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world_size > 1 or trainer.global_step < self._next_look:
            return
        found = self._summary()
        steps = 0 if found is None else found.steps
        # Looking takes time that counts: the further on, the rarer.
        self._next_look = trainer.global_step + max(MIN_STEPS - steps, steps // 4, 1)
        if found is not None and steps >= MIN_STEPS and _is_known(found, self._within):
            trainer.should_stop = True


def _is_known(found: StepSummary, within: float) -> bool:
    if found.ci95 is None or found.samples_per_s <= 0:
        return False
    low, high = found.ci95
    return (high - low) / 2 <= within * found.samples_per_s
