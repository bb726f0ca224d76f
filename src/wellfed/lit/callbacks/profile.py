"""Records some steps with torch.profiler and leaves a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile, schedule

SKIPPED_STEPS = 5


class Profile(pl.Callback):
    """``steps`` steps after the first 5, written when the last of them ends."""

    def __init__(self, path: Path, steps: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._path = path
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda finished: finished.export_chrome_trace(str(path)),
        )

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._profiler.step()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._profiler.stop()
