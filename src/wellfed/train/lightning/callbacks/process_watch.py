"""Records threads of torch, trained tensors and other busy threads of the training process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.record import ProcessEntry

_LEAST_CORES = 0.05
"""Minimum share of a core that a recorded thread uses."""
_OF_OURS = ("wellfed", "MainThread")
"""Prefixes of the names of threads that belong to training."""


class ProcessWatch(pl.Callback):
    """CPU time of each Python thread between the warm-up and the end of training.

    Args:
        on_found: called once, at the end of training.
    """

    def __init__(self, on_found: Callable[[ProcessEntry], None]) -> None:
        self._on_found = on_found
        self._began: tuple[float, dict[int, float]] | None = None
        self._num_ended = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._num_ended += 1
        if self._num_ended == WARMUP_STEPS:
            self._began = time.monotonic(), _cpu_s()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        found: ProcessEntry = {
            "torch_threads": torch.get_num_threads(),
            "parameter_tensors": len(trained),
            "parameter_values": sum(weight.numel() for weight in trained),
            "parameter_bytes": sum(weight.nbytes for weight in trained),
            "busy_threads": [],
        }
        if self._began is not None:
            began_s, before = self._began
            passed_s, after = max(time.monotonic() - began_s, 1e-3), _cpu_s()
            for thread in threading.enumerate():
                number = thread.native_id
                if number is None or number == threading.get_native_id() or thread.name.startswith(_OF_OURS):
                    continue
                cores = (after.get(number, 0.0) - before.get(number, 0.0)) / passed_s
                if cores >= _LEAST_CORES:
                    found["busy_threads"].append({"name": thread.name, "cores": round(cores, 3)})
        self._on_found(found)


def _cpu_s() -> dict[int, float]:
    """Returns the CPU seconds of each thread of this process, by native id."""
    try:
        return {one.id: one.user_time + one.system_time for one in psutil.Process().threads()}
    except (psutil.Error, OSError):
        return {}
