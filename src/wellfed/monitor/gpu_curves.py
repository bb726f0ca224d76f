"""Watches the GPUs in any Trainer, of lightning.pytorch or pytorch_lightning, and logs the curves."""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from wellfed.errors import type_and_line
from wellfed.monitor.error_guard import harmless
from wellfed.monitor.loop_watch import LoopWatch
from wellfed.monitor.loop_watcher import LoopWatcher
from wellfed.observe.telemetry.metrics import TIME_AXIS, prefix
from wellfed.observe.telemetry.series import Sample

_LOG = logging.getLogger(__name__)
_FETCHING = ("_on_before_fetch", "_on_after_fetch")
"""Methods of a Trainer's loop around the wait for the next training batch."""
_COST_FRAC, _OFTEN_S = 0.01, 1.0
"""Maximum share of time for writing to loggers, and minimum seconds between writes."""


class LoggerFeed:
    """Passes readings and times of steps to a Trainer's loggers. Used in the training thread alone, since few loggers
    are thread-safe."""

    def __init__(self) -> None:
        self._sent_steps = 0
        self._send_at_s = time.monotonic()
        self._lost: set[int] = set()
        """Ids of the loggers that have failed."""
        self._drawn: set[str] = set()
        """Figures that wandb has an axis for."""

    def send(self, watch: LoopWatch, trainer: Any, *, is_last: bool) -> None:
        """Passes on what is new, if it is time for it, or if it is the last."""
        now_s = time.monotonic()
        if not (is_last or now_s >= self._send_at_s):
            return
        figures = {
            **mean_of([watch.unsent.popleft() for _ in range(len(watch.unsent))]),
            **watch.steps.means_since(self._sent_steps),
        }
        self._sent_steps = watch.steps.number
        for logger in trainer.loggers if trainer.is_global_zero and figures else ():
            if id(logger) not in self._lost:
                try:
                    self._log(logger, figures, trainer.global_step)
                except Exception as error:  # noqa: BLE001  a broken logger
                    self._lost.add(id(logger))
                    _LOG.warning("%s gets no curves any more (%s).", type(logger).__name__, type_and_line(error))
        self._send_at_s = now_s + max(_OFTEN_S, (time.monotonic() - now_s) / _COST_FRAC)  # of a logger with a server

    def _log(self, logger: Any, figures: Mapping[str, float], step: int) -> None:
        if not any(kind.__name__ == "WandbLogger" for kind in type(logger).__mro__):
            logger.log_metrics(figures, step=step)
            return
        steps = {name: value for name, value in figures.items() if name.startswith("step/")}
        curves = {name: value for name, value in figures.items() if name not in steps}
        experiment = logger.experiment  # of wandb: a separate row over its own axis, without the logger's step
        for name in curves.keys() - self._drawn:
            is_axis = name == TIME_AXIS
            experiment.define_metric(name, **({"hidden": True} if is_axis else {"step_metric": TIME_AXIS}))
        self._drawn |= curves.keys()
        if curves:
            experiment.log(curves)
        if steps:
            logger.log_metrics(steps, step=step)


def _bases() -> tuple[type, ...]:
    """Returns the Callback class of each installed Lightning, since a Trainer accepts only its own."""
    loaded = (sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning"))
    found = tuple(module.Callback for module in loaded if module is not None and hasattr(module, "Callback"))
    if found:
        return found
    from lightning.pytorch import Callback

    return (Callback,)


class GPUCurves(LoopWatcher, *_bases()):  # type: ignore[misc]
    """Curves of GPUs and host for the Trainer's loggers, times of the steps, and a short summary after `fit`.

    The curves are ``gpu0/util_pct`` and so on, in wandb over ``telemetry/time_s``, in other loggers over the step. The
    times of a step are ``step/wait_ms`` and so on. A step is one training batch. On CUDA, events on the device time the
    steps without synchronising. Its own errors are logged once and do not affect training. The first process of each
    machine watches.
    """

    _is_shown = True
    """The summary of the latest `fit` was printed."""
    _loop: Any = None
    """Loop of the Trainer whose methods set marks."""
    _feed: LoggerFeed | None = None

    def abandon(self) -> None:
        loop, self._loop = self._loop, None
        for name in _FETCHING if loop is not None else ():
            vars(loop).pop(name, None)  # restores the loop's own methods
        super().abandon()

    @harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.abandon()  # an earlier fit that did not end
        if trainer.local_rank != 0:
            return
        on_cuda = trainer.strategy.root_device.type == "cuda"
        watch = self._open(trainer.node_rank, only=set(trainer.device_ids) if on_cuda else None)
        if on_cuda:
            watch.steps.use_events()
        watch.fed_by(trainer.train_dataloader)
        self._is_shown = False
        self._feed = LoggerFeed()
        watch.enter("train")
        self._mark_fetches(trainer.fit_loop.epoch_loop)

    def _mark_fetches(self, loop: Any) -> None:
        """Marks when the loop requests and gets a batch. In a loop without such methods the wait stays unknown. Uses no
        profiler of the Trainer, which is called fifty times a step."""
        if all(hasattr(loop, name) for name in _FETCHING):
            for name, mark in zip(_FETCHING, (self.ask, self.got), strict=True):
                setattr(loop, name, _both(getattr(loop, name), mark))
            self._loop = loop

    @harmless
    def ask(self) -> None:
        """Marks that the Trainer requests a batch."""
        if (watch := self._opened) is not None:
            watch.steps.ask()

    @harmless
    def got(self) -> None:
        """Marks that the Trainer has the batch."""
        if (watch := self._opened) is not None:
            watch.steps.got()

    @harmless
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (watch := self._opened) is not None:
            if "wait_frac" in watch.steps.unknown:  # no marks of fetching
                watch.steps.clock.ask()
                watch.steps.got()
            watch.steps.copied()

    @harmless
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (watch := self._opened) is not None:
            watch.steps.done()
            self._send(watch, trainer)

    @harmless
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if (watch := self._opened) is not None:
            watch.enter("validate")

    @harmless
    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **named: Any) -> None:
        if (watch := self._opened) is not None:
            self._send(watch, trainer)

    @harmless
    def on_train_epoch_start(self, trainer: Any, pl_module: Any, *more: Any) -> None:
        if (watch := self._opened) is not None:
            watch.enter("train")

    on_validation_end = on_train_epoch_start
    on_save_checkpoint = on_train_epoch_start  # the time of saving belongs to no step

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(trainer, is_ok=True)

    @harmless
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(trainer, is_ok=False)
        self._show(trainer)

    @harmless
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end(trainer, is_ok=False)
        self._show(trainer)  # the progress bar is closed only here

    @property
    def _opened(self) -> LoopWatch | None:
        return self._watch if self._is_open else None

    def _end(self, trainer: Any, *, is_ok: bool) -> None:
        watch = self._opened
        if watch is not None and self._close(is_ok=is_ok):
            self._send(watch, trainer, is_last=True)
            self.abandon()

    def _show(self, trainer: Any) -> None:
        if not self._is_shown:
            self._is_shown = True
            self._print(self.lines(), f" (node {trainer.node_rank})" if trainer.node_rank else "")

    def _send(self, watch: LoopWatch, trainer: Any, *, is_last: bool = False) -> None:
        if self._feed is not None:
            self._feed.send(watch, trainer, is_last=is_last)


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], None]:
    def called() -> None:
        first()
        second()

    return called


def mean_of(rounds: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Returns a row for a logger: means of the readings, and the time of the last; empty without readings."""
    figures: defaultdict[str, list[float]] = defaultdict(list)
    last_s = 0.0
    for one in (sample for each in rounds for sample in each):
        last_s = one.time_s
        for name, value in one.values.items():
            figures[f"{prefix(one.gpu)}/{name}"].append(value)
    return {TIME_AXIS: last_s, **{name: fmean(values) for name, values in figures.items()}} if figures else {}
