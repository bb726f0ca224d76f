"""Measures memory and CPU time of a run."""

from __future__ import annotations

import time

import psutil
import torch

from wellfed.observe.telemetry.host import peak_rss_bytes, spent_cpu_s
from wellfed.plan.run_plan import RunPlan
from wellfed.record.entries import HostEntry, MemoryEntry
from wellfed.units import gib


class Usage:
    """Memory and CPU time of training, from now on."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._process = plan, psutil.Process()
        self._rss_before = self._process.memory_info().rss
        self._cpu_before_s, self._began_s = spent_cpu_s(), time.monotonic()
        self._at_the_end: tuple[MemoryEntry, HostEntry] | None = None

    def stop(self) -> None:
        """Ends the measurement with the training."""
        self._at_the_end = self.entries()

    def entries(self) -> tuple[MemoryEntry, HostEntry]:
        """Returns ``memory`` and ``host`` of the record. On CUDA the peak is the allocator's reservation, otherwise the
        growth of peak RSS. cpu_pct counts 100 for each core kept busy by this process and its workers."""
        if self._at_the_end is not None:
            return self._at_the_end
        if self._plan.on_gpu:
            peak = float(torch.cuda.max_memory_reserved())
        else:
            peak = max(0.0, peak_rss_bytes() - self._rss_before)
        memory: MemoryEntry = {
            "device": self._plan.device.name,
            "budget_gib": self._plan.device.memory_gib,
            "predicted_peak_gib": self._plan.predicted_peak_gib,
            "measured_peak_gib": gib(peak),
            "may_lower": list(self._plan.may_lower),
            "feature_table_gib": gib(self._plan.feature_table_bytes) if self._plan.feature_table_bytes else None,
        }
        host: HostEntry = {
            "cpu_pct": 100 * (spent_cpu_s() - self._cpu_before_s) / max(1e-9, time.monotonic() - self._began_s),
            "rss_gib": gib(self._process.memory_info().rss),
        }
        return memory, host
