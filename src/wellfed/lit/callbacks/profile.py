"""Records some steps with torch.profiler and leaves a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

_LOG = logging.getLogger(__name__)
SKIPPED_STEPS = 5


class ProfilerTrace(pl.Callback):
    """``steps`` steps after the first 5, written when the last of them ends, or the run."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps = path, steps
        self._profiler: profile | None = None

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._profiler = profile(
            activities=_activities(trainer.strategy.root_device),
            schedule=schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=lambda finished: finished.export_chrome_trace(str(self._path)),
        )
        self._profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        # A profiler that still records when Python ends brings the process down: a signal in place of the exit code.
        try:
            self._stop()
        except RuntimeError as error:  # of a card that no longer answers
            _LOG.info("the profiler could not be stopped: %s", error)

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """The host's, and the card's where this build of torch can record them.

    Asked for what it can't, torch warns with a stack of frames at every operation.
    """
    if device.type == "cuda":
        if ProfilerActivity.CUDA in supported_activities():  # type: ignore[no-untyped-call]
            return [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        _LOG.warning("This build of torch can't record what a card does: profile.json shows the host alone.")
    return [ProfilerActivity.CPU]
