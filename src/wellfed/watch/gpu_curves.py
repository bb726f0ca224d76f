"""Watches the GPUs in any Trainer, of lightning.pytorch or pytorch_lightning, and logs the curves."""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from wellfed.errors import type_and_line
from wellfed.observe.telemetry.metrics import TIME_AXIS, curve
from wellfed.observe.telemetry.series import Sample
from wellfed.watch.error_guard import harmless
from wellfed.watch.loop_watch import LoopWatch
from wellfed.watch.script_process import ScriptEnd
from wellfed.watch.script_record import ScriptRecord
from wellfed.watch.watched_script import WatchedScript

_LOG = logging.getLogger(__name__)
_TIMES = ("wait_ms", "copy_ms", "compute_ms", "host_ms")
_COST_FRAC, _OFTEN_S = 0.01, 1.0
"""Maximum share of time for writing to loggers, and minimum seconds between writes."""
_MOST_UNSENT = 10_000
"""Maximum number of readings that wait for the loggers. Beyond it the oldest are dropped."""


def _bases() -> tuple[type, ...]:
    """Returns the Callback class of each installed Lightning, since a Trainer accepts only its own."""
    loaded = (sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning"))
    found = tuple(module.Callback for module in loaded if module is not None and hasattr(module, "Callback"))
    if found:
        return found
    from lightning.pytorch import Callback

    return (Callback,)


class GPUCurves(LoopWatch, *_bases()):  # type: ignore[misc]
    """Watches a `fit` as `Watch` does. The Trainer's loggers get curves of GPUs and host, and times of the steps.

    The curves are ``gpu0/util_pct`` and so on, in wandb over ``telemetry/time_s``, in other loggers over the step. The
    times of a step are ``step/wait_ms`` and so on. Its own errors are logged once and do not affect training. The first
    process watches. Within another watch it does nothing.
    """

    _watched: WatchedScript | None = None

    def abandon(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.finish(ScriptEnd(0), is_shown=False)

    @harmless
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.abandon()  # an earlier fit that did not end
        self._unsent: deque[Sample] = deque(maxlen=_MOST_UNSENT)
        self._sent_steps, self._send_at_s = 0, time.monotonic()
        self._lost: set[int] = set()
        """Ids of the loggers that have failed."""
        self._drawn: set[str] = set()
        """Figures that wandb has an axis for."""
        self._watched = WatchedScript(
            self._script,
            self._log_dir,
            interval_s=self._interval_s,
            receive=self._unsent.extend,
            all_gpus=trainer.strategy.root_device.type != "cuda",
        )
        self._watched.start()

    @harmless
    def on_train_batch_end(self, trainer: Any, *arguments: Any, **named: Any) -> None:
        if self._watched is not None and time.monotonic() >= self._send_at_s:
            self._send(trainer)

    on_validation_batch_end = on_train_batch_end

    @harmless
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(trainer, exception)

    @harmless
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end(trainer, None)  # the progress bar is closed only here

    def _end(self, trainer: Any, error: BaseException | None) -> None:
        watched = self._watched
        if watched is not None:
            if watched.record is not None and watched.record.is_open:
                watched.record.epochs(trainer.current_epoch)  # Lightning does not read a loader to its end
            watched.finish(ScriptEnd(0 if error is None else 1, error), is_shown=not self._quiet)
            self._send(trainer)
            self._watched = None
            self._copy_curves()

    # Loggers, in the training thread alone, since few of them are thread-safe

    def _send(self, trainer: Any) -> None:
        """Passes on what is new to the loggers."""
        record = None if self._watched is None else self._watched.record
        if not isinstance(record, ScriptRecord) or not record.is_open:
            return
        now_s, self._record = time.monotonic(), record
        figures = mean_of([self._unsent.popleft() for _ in range(len(self._unsent))])
        new, self._sent_steps = record.record.steps - self._sent_steps, record.record.steps
        if new and (recent := record.journal.recent(new)) is not None:
            figures |= {f"step/{name}": mean_ms for name, mean_ms in recent.means_ms().items() if name in _TIMES}
        for logger in trainer.loggers if figures else ():
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


def mean_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns a row for a logger: means of the readings, and the time of the last; empty without readings."""
    figures: defaultdict[str, list[float]] = defaultdict(list)
    for one in samples:
        for name, value in one.values.items():
            figures[curve(one.gpu, name)].append(value)
    times = {TIME_AXIS: samples[-1].time_s} if figures else {}
    return {**times, **{name: fmean(values) for name, values in figures.items()}}
