"""Watches the machine during a run, and measures memory and CPU time of the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from wellfed.config.schema import TelemetryConfig
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.observe.loggers.journal import Journal
from wellfed.observe.telemetry.gpu import WatchedGpu
from wellfed.observe.telemetry.host import peak_rss_bytes, spent_cpu_s
from wellfed.observe.telemetry.machines import named, of_node
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.sampler import Sampler
from wellfed.observe.telemetry.series import Phase, Sample, Summary
from wellfed.plan.run_plan import RunPlan
from wellfed.record import EventKind, HostEntry, MemoryEntry, TelemetryEntry
from wellfed.units import gib

_KEPT_READINGS = 2000
"""Number of readings that the screen of a run sees, of all GPUs and hosts together."""


@dataclass(frozen=True)
class NodeMessage:
    """Message of another node to rank 0: readings as (step, phase, GPU, values), or an event."""

    node: int
    readings: tuple[tuple[int, Phase, int, Mapping[str, float]], ...] = ()
    event: tuple[EventKind, Mapping[str, Any]] | None = None


def _sampler(
    config: TelemetryConfig,
    facts: MachineFacts,
    plan: RunPlan,
    progress: Progress,
    *takers: Any,
    more: Collection[int] = (),
    **options: Any,
) -> Sampler:
    """Returns a sampler of this machine, which first reports what NVML can't read. The rest is for `Sampler`.

    Args:
        more: as for `gpus_to_watch`.
    """
    sampler = Sampler(*takers, interval_s=config.interval_s, progress=progress, **options)
    failed = [f"NVML: {facts.nvml_problem}. GPU figures are absent."] if facts.nvml_failed else []
    sampler.watch(gpus_to_watch(facts, plan, more), refused=[*failed, *facts.cards_left_out])
    return sampler


def node_watch(
    config: TelemetryConfig,
    facts: MachineFacts,
    plan: RunPlan,
    progress: Progress,
    node: int,
    send: Callable[[NodeMessage], None],
) -> Sampler:
    """Returns a sampler of this machine that sends its readings to rank 0 on another machine."""

    def publish(samples: Sequence[Sample]) -> None:
        readings = tuple((one.step, one.phase, of_node(node, one.gpu), dict(one.values)) for one in samples)
        send(NodeMessage(node, readings))

    def event(kind: EventKind, **facts: Any) -> None:
        where = {"gpu": named(of_node(node, facts["gpu"]))} if "gpu" in facts else {"node": node}
        send(NodeMessage(node, event=(kind, {**facts, **where})))

    return _sampler(config, facts, plan, progress, lambda samples: None, event, publish, time_s=time.monotonic)


class MachineWatch:
    """Reads this machine for telemetry.csv and the sink, and summarises the readings for the record.

    Args:
        more: as for `gpus_to_watch`.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        facts: MachineFacts,
        plan: RunPlan,
        journal: Journal,
        progress: Progress,
        more: Collection[int] = (),
    ) -> None:
        self._interval_s, self._journal, self._progress = config.interval_s, journal, progress
        self._summary = Summary(progress.trained_s)
        self._samples_before = journal.record.samples
        self.latest: deque[Sample] = deque(maxlen=_KEPT_READINGS)
        """The latest readings, also those of other nodes."""
        takers = self._take, self._event, journal.publish
        self.sampler = _sampler(config, facts, plan, progress, *takers, more=more, time_s=journal.time_s)

    def take_message(self, message: NodeMessage) -> None:
        """Takes the message of another node, with the time of its arrival."""
        if message.event is not None:
            kind, facts = message.event
            self.sampler.event(kind, **facts)

        def stamped() -> list[Sample]:
            time_s = self._journal.time_s()
            return [Sample(time_s, *reading) for reading in message.readings]

        self.sampler.take(stamped)

    def gpus(self) -> dict[str, Any]:
        """Returns ``gpus`` of the record."""
        trained_s = self._progress.trained_s(0.0, self._journal.time_s())
        return self._summary.entry(self._journal.record.samples - self._samples_before, trained_s)

    def cost(self) -> TelemetryEntry:
        """Returns ``telemetry`` of the record."""
        return {"interval_s": self._interval_s, "cpu_frac": self.sampler.cpu_frac()}

    def _take(self, samples: Sequence[Sample]) -> None:
        self._journal.telemetry(samples)
        self.latest.extend(samples)
        self._summary.add(samples)

    def _event(self, kind: EventKind, **facts: Any) -> None:
        self._journal.event(kind, self._progress.step, **facts)


def gpus_to_watch(facts: MachineFacts, plan: RunPlan, more: Collection[int] = ()) -> list[WatchedGpu]:
    """Returns the GPUs that the run trains on; for training on the CPU, all that CUDA would show it.

    Args:
        more: numbers of further GPUs, which the model drives by itself.
    """
    used = {*range(plan.trainer.devices), *more}
    return WatchedGpu.of(gpu for gpu in facts.gpus if not plan.on_gpu or gpu.index in used)


class Usage:
    """Memory and CPU time of training, from now on."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._process = plan, psutil.Process()
        self._rss_before = self._process.memory_info().rss
        self._cpu_before_s, self._began_s = spent_cpu_s(), time.monotonic()
        self._at_the_end: tuple[MemoryEntry, HostEntry] | None = None

    def stop(self) -> None:
        """Ends the measurement with the training."""
        with suppress(OSError):  # `entries` tries again, and its caller reports the error
            self._at_the_end = self.entries()

    def held_gib(self) -> float | None:
        """Returns the memory that the allocator holds now; None without a card."""
        return gib(torch.cuda.memory_reserved()) if self._plan.on_gpu else None

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
        shm = Path("/dev/shm")
        host: HostEntry = {
            "cpu_pct": 100 * (spent_cpu_s() - self._cpu_before_s) / max(1e-9, time.monotonic() - self._began_s),
            "rss_gib": gib(self._process.memory_info().rss),
            "shm_gib": gib(psutil.disk_usage(str(shm)).used) if shm.is_dir() else None,
        }
        return memory, host
