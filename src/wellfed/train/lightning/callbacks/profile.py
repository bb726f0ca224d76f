"""Records some steps with torch.profiler, writes a trace for Perfetto, and reports the use of their time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch._C import _autograd
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from wellfed.errors import reason_of
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.observe.timing.trace_figures import STEP, figures
from wellfed.record.entries import OnEvent, ProfileEntry, ignore_event
from wellfed.train.lightning.callbacks.clock import is_within_step
from wellfed.train.lightning.module import StepModule

_LOG = logging.getLogger(__name__)


class ProfilerTrace(pl.Callback):
    """Recording of ``steps`` steps after the warm-up. The trace is written after the last one, or at the run's end.

    A step begins at the end of the previous one. After a validation, a checkpoint or an epoch it begins with its batch.
    A failed step is in the trace, but not in the figures. The device is idle at the start of the first step and at the
    end of the last one. The run's rates leave out recorded steps, since recording takes time. Errors are events.

    Args:
        on_profiled: called once with the figures of the recorded steps, if there are any.
        interrupt: called after writing the trace, which takes time outside of steps.
    """

    def __init__(
        self,
        path: Path,
        steps: int,
        on_profiled: Callable[[ProfileEntry], None],
        *,
        on_event: OnEvent = ignore_event,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._steps = path, steps
        self._on_profiled, self._on_event, self._interrupt = on_profiled, on_event, interrupt
        self._num_ended = 0
        self._profiler: profile | None = None
        self._is_recording = False
        self._range: Any = None

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        # Kineto, torch's recorder, prints each start and stop to stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with self._guarded():
            self._profiler = profile(activities=_activities(trainer.strategy.root_device))

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._is_recording and batch_idx % trainer.accumulate_grad_batches == 0:
            owner: Any = (module.step if isinstance(module, StepModule) else None) or module
            owner.was_disturbed = True
            self._begin()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._profiler is None or is_within_step(trainer):
            return
        self._num_ended += 1
        if self._num_ended == WARMUP_STEPS - 1:  # its first use is slow
            with self._guarded():
                if _autograd._profiler_enabled():  # torch would end the other recording
                    raise RuntimeError("another of torch's profilers is at work")
                self._profiler.prepare_trace()
        elif self._num_ended == WARMUP_STEPS:
            with self._guarded():
                _wait_for(trainer.strategy.root_device)
                self._profiler.start_trace()
                self._is_recording = True
                self._begin()
        elif self._num_ended == WARMUP_STEPS + self._steps:
            self._stop(trainer)
        elif self._is_recording:
            self._end()
            self._begin()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._pause(trainer)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._pause(trainer)
        self._record_operations(False)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._record_operations(True)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self._pause(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._stop(trainer)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        # A profiler that still records when Python ends kills the process by a signal.
        self._record_operations(True)
        self._stop(trainer)

    def _begin(self) -> None:
        if self._range is None:
            self._range = record_function(f"{STEP}{self._num_ended + 1}")
            self._range.__enter__()

    def _end(self) -> None:
        found, self._range = self._range, None
        if found is not None:
            found.__exit__(None, None, None)

    def _pause(self, trainer: pl.Trainer) -> None:
        """Ends the current step's range; the next one begins with its batch."""
        if self._range is not None:
            with self._guarded():
                _wait_for(trainer.strategy.root_device)
            self._end()

    def _record_operations(self, on: bool) -> None:
        """Switches the recording of operations, of which an evaluation may have many times those of the steps."""
        if self._is_recording:
            _autograd._enable_record_function(on)

    def _stop(self, trainer: pl.Trainer) -> None:
        self._pause(trainer)
        profiler, self._profiler = self._profiler, None
        was_recording, self._is_recording = self._is_recording, False
        if profiler is None:
            return
        if not was_recording or self._num_ended == WARMUP_STEPS:
            _LOG.warning("No step was profiled: training ended before its step %d.", WARMUP_STEPS + 1)
        if self._num_ended < WARMUP_STEPS - 1:
            return
        with self._guarded():
            if not was_recording:  # the only way to end a prepared profiler
                profiler.start_trace()
            profiler.stop_trace()
            if was_recording and self._num_ended > WARMUP_STEPS:
                self._write(profiler)
        self._interrupt()

    def _write(self, profiler: profile) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path))
        events = profiler.events()  # type: ignore[no-untyped-call]
        if (found := figures(events, last=self._num_ended)) is not None:
            self._on_profiled(found)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Converts an error in the context to an event, so that only the trace is lost."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  a trace is no reason to lose a run
            profiler, self._profiler = self._profiler, None
            was_recording, self._is_recording = self._is_recording, False
            message = reason_of(error)
            _LOG.warning("The steps could not be profiled: %s", message)
            self._on_event("profile_failed", message=message)
            if profiler is not None and was_recording:
                self._end()
                with suppress(Exception):
                    profiler.stop_trace()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """Returns the activity of the host, and of the card if this build of torch can record it.

    Otherwise torch would print a stack of frames at every operation.
    """
    if device.type == "cuda":
        if ProfilerActivity.CUDA in supported_activities():  # type: ignore[no-untyped-call]
            return [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        _LOG.warning("This build of torch can't record what a card does: the profile shows the host alone.")
    return [ProfilerActivity.CPU]
