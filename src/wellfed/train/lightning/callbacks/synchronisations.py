"""Searches lines where the host waits for the GPU, in the first steps of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from wellfed.record import SynchronisationEntry
from wellfed.train.lightning.callbacks.clock import is_within_step
from wellfed.train.step.synchronisation_search import SynchronisationSearch


class Synchronisations(pl.Callback):
    """Search within a Trainer. Call `close` however training ends.

    Args:
        on_found: called once with the lines found, unless training ends before.
    """

    def __init__(self, on_found: Callable[[list[SynchronisationEntry]], None]) -> None:
        self._search = SynchronisationSearch(on_found)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not is_within_step(trainer):
            self._search.step_ended()

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._search.pause()

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._search.go_on()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the search."""
        self._search.close()
