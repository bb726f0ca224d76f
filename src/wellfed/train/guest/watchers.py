"""Calls what watches a training: bar, trace, and search for waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from wellfed.train.guest.marks import is_within_step
from wellfed.train.loop.bar import Bar
from wellfed.train.loop.sync_search import SyncSearch
from wellfed.train.loop.trace import ProfilerTrace


class Watchers(pl.Callback):
    """Bar, trace of torch.profiler, and search for waits for the GPU. Each is closed by its owner."""

    def __init__(
        self,
        bar: Bar,
        trace: ProfilerTrace | None,
        search: SyncSearch | None,
        on_sanity: Callable[[pl.Trainer], None],
    ) -> None:
        """``on_sanity``: called after Lightning's batches of validation before training."""
        self._bar, self._trace, self._search, self._on_sanity = bar, trace, search, on_sanity

    def on_sanity_check_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._on_sanity(trainer)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._bar.begin(trainer.global_step)
        if self._trace is not None:
            self._trace.begin(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._trace is not None and self._trace.is_recording:
            module.was_disturbed = True

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._bar.look("training", trainer.global_step)
        if is_within_step(trainer, batch_idx):
            return
        if self._trace is not None:
            self._trace.step_ended()
        if self._search is not None:
            self._search.step_ended()

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self._search is not None and not trainer.sanity_checking:
            self._search.close()

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._bar.look("validating", trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._bar.close()
        for one in (self._trace, self._search):
            if one is not None:
                one.close()

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.sanity_checking:
            note = "in the val batches that are tried before training; trainer.sanity_batches=0 tries none"
            _[-1].add_note(note)
        self.on_train_end(trainer)
