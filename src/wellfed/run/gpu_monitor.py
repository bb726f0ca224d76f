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
from wellfed.observe.telemetry.gpu import WatchedGpu
from wellfed.observe.telemetry.machines import named, of_node
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.sampler import Sampler
from wellfed.observe.telemetry.series import Phase, Sample, Summary
from wellfed.plan.run_plan import RunPlan
from wellfed.record import EventKind, HostEntry, MemoryEntry, TelemetryEntry
from wellfed.units import gib


@dataclass(frozen=True)
class NodeMessage:
    """Message of another node to rank 0: readings as (step, phase, GPU, values), or an event."""

    node: int
    readings: tuple[tuple[int, Phase, int, Mapping[str, float]], ...] = ()
    event: tuple[EventKind, Mapping[str, Any]] | None = None


class _Watching(ExitStack):
    """The sampler of a machine while the ``with`` block lasts. Begins with an event for each card it can't read."""

    def __init__(
        self,
        config: TelemetryConfig,
        facts: MachineFacts,
        plan: RunPlan,
        progress: Progress,
        time_s: Callable[[], float],
    ) -> None:
        super().__init__()
        self._facts, self._progress, self._interval_s = facts, progress, config.interval_s
        self._sampler = Sampler(
            self._take, self._event, self._publish, interval_s=config.interval_s, progress=progress, time_s=time_s
        )
        self._sampler.watch(gpus_to_watch(facts, plan))

    def __enter__(self) -> Self:
        failed = [f"NVML: {self._facts.nvml_problem}. GPU figures are absent."] if self._facts.nvml_failed else []
        for message in (*failed, *self._facts.cards_left_out):
            self._event("telemetry_trouble", trouble="refused", message=message)
        self.enter_context(self._sampler)
        return self

    def _take(self, samples: Sequence[Sample]) -> None:
        """Gets the samples, one round at a time."""

    def _publish(self, samples: Sequence[Sample]) -> None:
        """Gets them afterwards, and may block."""

    def _event(self, kind: EventKind, **facts: Any) -> None:
        raise NotImplementedError


class NodeWatch(_Watching):
    """Reads this machine and sends the readings to rank 0, which is on another machine."""

    def __init__(
        self,
        config: TelemetryConfig,
        facts: MachineFacts,
        plan: RunPlan,
        progress: Progress,
        node: int,
        send: Callable[[NodeMessage], None],
    ) -> None:
        super().__init__(config, facts, plan, progress, time.monotonic)
        self._node, self._send = node, send

    def _publish(self, samples: Sequence[Sample]) -> None:
        readings = tuple((one.step, one.phase, of_node(self._node, one.gpu), dict(one.values)) for one in samples)
        self._send(NodeMessage(self._node, readings))

    def _event(self, kind: EventKind, **facts: Any) -> None:
        where = {"gpu": named(of_node(self._node, facts["gpu"]))} if "gpu" in facts else {"node": self._node}
        self._send(NodeMessage(self._node, event=(kind, {**facts, **where})))


class MachineWatch(_Watching):
    """Reads this machine for telemetry.csv and the sink. Figures can be asked for at any time."""

    def __init__(
        self, config: TelemetryConfig, facts: MachineFacts, plan: RunPlan, journal: Journal, progress: Progress
    ) -> None:
        super().__init__(config, facts, plan, progress, journal.time_s)
        self._journal = journal
        self._summary = Summary(progress.trained_s)
        self._samples_before = journal.record.samples

    def hear(self, told: NodeMessage) -> None:
        """Takes the message of another node, at the time at which it comes."""
        if told.event is not None:
            kind, facts = told.event
            self._sampler.event(kind, **facts)

        def stamped() -> list[Sample]:
            time_s = self._journal.time_s()
            return [Sample(time_s, *reading) for reading in told.readings]

        self._sampler.take(stamped)

    def gpus(self) -> dict[str, Any]:
        """Returns ``gpus`` of the record."""
        trained_s = self._progress.trained_s(0.0, self._journal.time_s())
        return self._summary.entry(self._journal.record.samples - self._samples_before, trained_s)

    def cost(self) -> TelemetryEntry:
        """Returns ``telemetry`` of the record."""
        return {"interval_s": self._interval_s, "cpu_frac": self._sampler.cpu_frac()}

    def _take(self, samples: Sequence[Sample]) -> None:
        self._journal.telemetry(samples)
        self._summary.add(samples)

    def _publish(self, samples: Sequence[Sample]) -> None:
        self._journal.publish(samples)

    def _event(self, kind: EventKind, **facts: Any) -> None:
        self._journal.event(kind, self._progress.step, **facts)


def gpus_to_watch(facts: MachineFacts, plan: RunPlan) -> list[WatchedGpu]:
    """Returns the GPUs that the run trains on; for training on the CPU, all that CUDA would show it."""
    return WatchedGpu.of(gpu for gpu in facts.gpus if not plan.on_gpu or gpu.index < plan.trainer.devices)


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
