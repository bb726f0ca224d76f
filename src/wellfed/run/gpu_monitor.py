"""Watches the machine while a run lasts, as the configuration asks, and sums up what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

from wellfed.config.schema import TelemetryConfig
from wellfed.hardware.facts import MachineFacts
from wellfed.planning.run_plan import RunPlan
from wellfed.record import EventKind, TelemetryEntry
from wellfed.telemetry.gpu import GpuSource, WatchedGpu
from wellfed.telemetry.host import HostSource
from wellfed.telemetry.outlet import Outlet
from wellfed.telemetry.run_progress import Progress
from wellfed.telemetry.sampler import Sampler, Source
from wellfed.telemetry.series import Sample
from wellfed.telemetry.summary import Summary
from wellfed.tracking.journal import Journal


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
        sources: list[Source] = [HostSource()]
        watched = gpus_to_watch(facts, plan)
        if watched:
            sources.append(GpuSource(watched, outlet.event))
        self._sampler = Sampler(sources, outlet, interval_s=config.interval_s, progress=progress, time_s=journal.time_s)

    def __enter__(self) -> Self:
        refusals = [f"NVML: {self._facts.nvml_problem}. GPU figures are absent."] if self._facts.nvml_failed else []
        for message in [*refusals, *self._facts.cards_left_out]:
            self._event("telemetry_trouble", trouble="refused", message=message)
        self.enter_context(self._sampler)
        return self

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
