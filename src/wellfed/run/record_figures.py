"""Measures what a run takes of memory and host, and writes its rates into the record."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from wellfed.config.schema import RunConfig
from wellfed.hardware.facts import MachineFacts
from wellfed.planning.run_plan import RunPlan
from wellfed.record import HostEntry, MachineEntry, MemoryEntry, RunRecord
from wellfed.timing.readiness import StepSummary
from wellfed.units import gib


class Usage:
    """Memory and CPU time of training, from `start` to `stop` (or to now)."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._rss_before = self._cpu_before_s = self._began_s = 0.0
        self._peak: float | None = None
        self._host: HostEntry | None = None
        self._on_cuda = False
        self.ballast_bytes = 0
        """Held to make a card smaller; no part of what the run needs."""

    def start(self, plan: RunPlan) -> None:
        """Training begins."""
        self._on_cuda = plan.on_gpu
        self._rss_before = self._process.memory_info().rss
        self._cpu_before_s, self._began_s = _cpu_s(self._process), time.monotonic()

    def stop(self) -> None:
        """Training is over: what comes after is not to be counted."""
        self._peak, self._host = self._measured_peak(), self.host()

    def memory(self, plan: RunPlan | None) -> MemoryEntry:
        """``memory`` of the record. On CUDA the peak is what the allocator reserved, else the growth of peak RSS."""
        if plan is None or not self._began_s:
            return {}
        return {
            "device": plan.device.name,
            "budget_gib": plan.device.memory_gib,
            "predicted_peak_gib": plan.predicted_peak_gib,
            "measured_peak_gib": gib(self._measured_peak() if self._peak is None else self._peak),
        }

    def host(self) -> HostEntry:
        """``host`` of the record: cpu_pct counts 100 for each core kept busy by this process and its workers."""
        if self._host is not None:
            return self._host
        if not self._began_s:
            return {}
        shm = Path("/dev/shm")
        return {
            "cpu_pct": 100 * (_cpu_s(self._process) - self._cpu_before_s) / max(1e-9, time.monotonic() - self._began_s),
            "rss_gib": gib(self._process.memory_info().rss),
            "shm_gib": gib(psutil.disk_usage(str(shm)).used) if shm.is_dir() else None,
        }

    def _measured_peak(self) -> float:
        if self._on_cuda:
            return float(torch.cuda.max_memory_reserved() - self.ballast_bytes)
        return max(0.0, _peak_rss() - self._rss_before)


def machine_entry(facts: MachineFacts) -> MachineEntry:
    """``machine`` of the record."""
    return {
        "cpu": facts.cpu,
        "cpu_quota_cores": facts.cpu_quota_cores,
        "ram_gib": facts.ram_gib,
        "shm_gib": facts.shm_gib,
        "gpus": [asdict(gpu) for gpu in facts.gpus],
        "versions": dict(facts.versions),
        "os": facts.os,
        "nvml_problem": facts.nvml_problem,
        "torch_problem": facts.torch_problem,
    }


def fill_in(record: RunRecord, summary: StepSummary | None, config: RunConfig) -> None:
    """``throughput``, ``time`` and ``readiness_frac`` of the record; rates count all ranks."""
    if summary is None:
        return
    record.throughput = {
        "samples_per_s": summary.samples_per_s,
        "ci95": list(summary.ci95) if summary.ci95 else None,
        "steps": summary.steps,
        "warmup_steps": summary.warmup_steps,
        "sample_unit": config.workload.sample_unit,
    }
    record.time = {
        "wait_frac": summary.wait_frac,
        "copy_frac": summary.copy_frac,
        "compute_frac": summary.compute_frac,
        "host_frac": summary.host_frac,
        "step_ms_p50": summary.step_ms_p50,
        "step_ms_p95": summary.step_ms_p95,
    }
    record.readiness_frac = summary.readiness_frac


def _peak_rss() -> float:
    """Bytes; Linux counts in KiB, macOS in bytes. Where there is no such counter, what is resident now."""
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().rss)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of the process and its finished children."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
