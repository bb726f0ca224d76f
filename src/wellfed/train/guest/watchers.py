"""Callbacks for what watches a training, and a check of those that the module brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from wellfed.errors import ConfigError
from wellfed.observe.loggers.log_media import logged_to
from wellfed.train.guest.marks import is_within_step
from wellfed.train.guest.users import fault_of_callback
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
        self._muted: Any = None

    def on_sanity_check_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._muted = logged_to(None)  # pictures and tables of these batches are not logged
        self._muted.__enter__()

    def on_sanity_check_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._unmute()
        self._on_sanity(trainer)

    def _unmute(self) -> None:
        muted, self._muted = self._muted, None
        if muted is not None:
            muted.__exit__(None, None, None)

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
        self._unmute()
        self.on_train_end(trainer)


class CheckedCallbacks(pl.Callback):
    """Check of the callbacks of ``configure_callbacks``, which are known once Lightning has asked for them."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        for callback in trainer.callbacks if stage == "fit" else ():
            if wrong := fault_of_callback(callback, self._strategy):
                raise ConfigError.of(f"{type(module).__name__}.configure_callbacks", *wrong)
