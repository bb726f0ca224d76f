"""Watches the machine while a run lasts, and measures what the run takes of memory and host."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from wellfed.config.schema import TelemetryConfig
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.observe.loggers.journal import Journal
from wellfed.observe.telemetry.gpu import GpuSource, WatchedGpu
from wellfed.observe.telemetry.host import HostSource
from wellfed.observe.telemetry.machines import named, of_node
from wellfed.observe.telemetry.outlet import Outlet
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.sampler import Sampler, Source
from wellfed.observe.telemetry.series import Phase, Sample
from wellfed.observe.telemetry.summary import Summary
from wellfed.plan.run_plan import RunPlan
from wellfed.record import EventKind, HostEntry, MemoryEntry, TelemetryEntry
from wellfed.units import gib


@dataclass(frozen=True)
class NodeMessage:
    """What another node tells rank 0 of itself: readings as (step, phase, GPU, values), or an event."""

    node: int
    readings: tuple[tuple[int, Phase, int, Mapping[str, float]], ...] = ()
    event: tuple[EventKind, Mapping[str, Any]] | None = None


class NodeWatch(ExitStack):
    """Reads this machine while the ``with`` block lasts, where rank 0 is on another, and tells it."""

    def __init__(
        self,
        config: TelemetryConfig,
        facts: MachineFacts,
        plan: RunPlan,
        progress: Progress,
        node: int,
        tell: Callable[[NodeMessage], None],
    ) -> None:
        super().__init__()
        self._facts, self._node, self._tell = facts, node, tell
        outlet = Outlet(lambda samples: None, self._event, self._send)
        sources = _sources(facts, plan, outlet)
        self._sampler = Sampler(sources, outlet, interval_s=config.interval_s, progress=progress, time_s=time.monotonic)

    def __enter__(self) -> Self:
        for message in _refusals(self._facts):
            self._event("telemetry_trouble", trouble="refused", message=message)
        self.enter_context(self._sampler)
        return self

    def _send(self, samples: Sequence[Sample]) -> None:
        readings = tuple((one.step, one.phase, of_node(self._node, one.gpu), dict(one.values)) for one in samples)
        self._tell(NodeMessage(self._node, readings))

    def _event(self, kind: EventKind, **facts: Any) -> None:
        where = {"gpu": named(of_node(self._node, facts["gpu"]))} if "gpu" in facts else {"node": self._node}
        self._tell(NodeMessage(self._node, event=(kind, {**facts, **where})))


def _sources(facts: MachineFacts, plan: RunPlan, outlet: Outlet) -> list[Source]:
    watched = gpus_to_watch(facts, plan)
    return [HostSource(), *([GpuSource(watched, outlet.event)] if watched else [])]


def _refusals(facts: MachineFacts) -> list[str]:
    refusals = [f"NVML: {facts.nvml_problem}. GPU figures are absent."] if facts.nvml_failed else []
    return [*refusals, *facts.cards_left_out]


class MachineWatch(ExitStack):
    """Rows of telemetry.csv and curves for the sink while the ``with`` block lasts; figures at any time."""

    def __init__(
        self, config: TelemetryConfig, facts: MachineFacts, plan: RunPlan, journal: Journal, progress: Progress
    ) -> None:
        super().__init__()
        self._config, self._facts, self._journal, self._progress = config, facts, journal, progress
        self._summary = Summary(progress.trained_s)
        self._samples_before = journal.record.samples
        outlet = Outlet(self._take, self._event, journal.publish)
        sources = _sources(facts, plan, outlet)
        self._sampler = Sampler(sources, outlet, interval_s=config.interval_s, progress=progress, time_s=journal.time_s)

    def __enter__(self) -> Self:
        for message in _refusals(self._facts):
            self._event("telemetry_trouble", trouble="refused", message=message)
        self.enter_context(self._sampler)
        return self

    def hear(self, told: NodeMessage) -> None:
        """Of another node, at the time at which it comes."""
        if told.event is not None:
            kind, facts = told.event
            self._sampler.outlet.event(kind, **facts)

        def stamped() -> list[Sample]:
            time_s = self._journal.time_s()
            return [Sample(time_s, *reading) for reading in told.readings]

        self._sampler.outlet.take(stamped)

    def gpus(self) -> dict[str, Any]:
        """``gpus`` of the record."""
        trained_s = self._progress.trained_s(0.0, self._journal.time_s())
        return self._summary.entry(self._journal.record.samples - self._samples_before, trained_s)

    def cost(self) -> TelemetryEntry:
        """``telemetry`` of the record."""
        return {"interval_s": self._config.interval_s, "cpu_frac": self._sampler.cpu_frac()}

    def _take(self, samples: Sequence[Sample]) -> None:
        self._journal.telemetry(samples)
        self._summary.add(samples)

    def _event(self, kind: EventKind, **facts: Any) -> None:
        self._journal.event(kind, self._progress.step, **facts)


def gpus_to_watch(facts: MachineFacts, plan: RunPlan) -> list[WatchedGpu]:
    """Those that the run trains on; where it trains on the CPU, all that CUDA would show it."""
    known = [gpu for gpu in facts.gpus if gpu.uuid is not None and gpu.nvml_index is not None]
    if plan.on_gpu:
        known = [gpu for gpu in known if gpu.index < plan.trainer.devices]
    return [WatchedGpu(gpu.index, str(gpu.uuid), gpu.is_mig) for gpu in known]


class Usage:
    """Memory and CPU time of training, from now on.

    Args:
        ballast_bytes: held to make a card smaller; no part of what the run needs.
    """

    def __init__(self, plan: RunPlan, ballast_bytes: int) -> None:
        self._plan, self._ballast_bytes, self._process = plan, ballast_bytes, psutil.Process()
        self._rss_before = self._process.memory_info().rss
        self._cpu_before_s, self._began_s = _cpu_s(self._process), time.monotonic()
        self._at_the_end: tuple[MemoryEntry, HostEntry] | None = None

    def stop(self) -> None:
        """Training is over: what comes after is not to be counted."""
        self._at_the_end = self.entries()

    def entries(self) -> tuple[MemoryEntry, HostEntry]:
        """``memory`` and ``host`` of the record.

        On CUDA the peak is what the allocator reserved, else the growth of peak RSS. cpu_pct counts 100 for each core
        kept busy by this process and its workers.
        """
        if self._at_the_end is not None:
            return self._at_the_end
        if self._plan.on_gpu:
            peak = float(torch.cuda.max_memory_reserved() - self._ballast_bytes)
        else:
            peak = max(0.0, _peak_rss() - self._rss_before)
        memory: MemoryEntry = {
            "device": self._plan.device.name,
            "budget_gib": self._plan.device.memory_gib,
            "predicted_peak_gib": self._plan.predicted_peak_gib,
            "measured_peak_gib": gib(peak),
            "may_lower": list(self._plan.may_lower),
        }
        shm = Path("/dev/shm")
        host: HostEntry = {
            "cpu_pct": 100 * (_cpu_s(self._process) - self._cpu_before_s) / max(1e-9, time.monotonic() - self._began_s),
            "rss_gib": gib(self._process.memory_info().rss),
            "shm_gib": gib(psutil.disk_usage(str(shm)).used) if shm.is_dir() else None,
        }
        return memory, host


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
