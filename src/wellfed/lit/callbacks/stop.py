"""Ends a run at the end of a step or a validation when a signal has asked for it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning.pytorch as pl


class Stopped(BaseException):
    """The run was asked to stop. Not an Exception: nothing on the way may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopRequest:
    """Turns SIGINT and SIGTERM into a request. While a step or a validation runs, the first
    waits for its end and the second does not.

    States: idle (a signal raises at once) -> stepping (a signal is noted; a second raises) -> idle.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.is_stepping = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Catch the signals inside, restore what was there before outside."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.is_stepping and self.signum is None:
            self.signum = signum
            return
        raise Stopped(signum)


class StopAtStepEnd(pl.Callback):
    """Must be the last callback: a checkpoint is written before the run ends."""

    def __init__(self, request: StopRequest, before_stop: Callable[[pl.Trainer], None]) -> None:
        self._request, self._before_stop = request, before_stop

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._request.is_stepping = True

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop_if_asked(trainer)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._request.is_stepping = True

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: pl.Trainer) -> None:
        self._request.is_stepping = False
        if self._request.signum is not None:
            self._before_stop(trainer)
            raise Stopped(self._request.signum)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self._request.is_stepping = False
