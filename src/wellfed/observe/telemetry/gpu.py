"""Reads the GPUs of a run, and detects which figures each offers. A lost GPU is reported and no longer read."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from wellfed.observe.hardware.facts import GpuFacts
from wellfed.observe.nvml import gpm, readings
from wellfed.observe.nvml.session import NO_DATA, NOT_SUPPORTED, NvmlError, NvmlSession
from wellfed.observe.telemetry.metrics import SLOW_METRICS
from wellfed.observe.telemetry.series import Reading, Source
from wellfed.record.entries import EventKind, OnEvent


@dataclass(frozen=True)
class WatchedGpu:
    """A GPU to watch."""

    index: int
    """CUDA-visible number, under which its figures are published."""
    uuid: str
    is_mig: bool = False

    @classmethod
    def of(cls, gpus: Iterable[GpuFacts]) -> list[WatchedGpu]:
        """Returns those of these GPUs that NVML can read."""
        return [
            cls(gpu.index, gpu.uuid, gpu.is_mig) for gpu in gpus if gpu.uuid is not None and gpu.nvml_index is not None
        ]


class _Gpu:
    """Readers of one GPU, which keep state between readings, and what is known of each query."""

    def __init__(self, gpu: WatchedGpu, nvml: NvmlSession, now_s: Callable[[], float]) -> None:
        self.index = gpu.index
        self.device = readings.OpenDevice(gpu.uuid, nvml)
        self.utilisation = readings.Utilisation(self.device, "gpu")
        self.memory_utilisation = readings.Utilisation(self.device, "memory")
        self.gpm = gpm.Gpm(self.device, is_mig=gpu.is_mig, now_s=now_s)
        self.power = readings.Power(self.device, now_s=now_s)
        self.is_new = True
        """Nothing was read yet: the first reading makes every query."""
        self.refused: dict[_Query, str] = {}
        """Queries that this GPU does not offer, with the reason."""
        self.answered: set[_Query] = set()
        self.seen: set[str] = set()
        """Names of figures that were read at least once."""
        self.reported: set[str] = set()
        """Figures reported as absent, and kinds of trouble."""


@dataclass(frozen=True, eq=False)
class _Query:
    """One query of the driver: the figures that it may give, and how to ask."""

    names: tuple[str, ...]
    ask: Callable[[_Gpu], float | Mapping[str, float]]

    @property
    def is_slow(self) -> bool:
        return SLOW_METRICS.issuperset(self.names)


_POWER = _Query(("power_w", "energy_j"), lambda gpu: gpu.power.read())
"""Counted over time, so it is also read when training begins or ends."""
_GPM = _Query(tuple(gpm.FIGURES), lambda gpu: gpu.gpm.read())
_QUERIES = (
    _Query(("util_pct",), lambda gpu: gpu.utilisation.read()),
    _Query(("mem_util_pct",), lambda gpu: gpu.memory_utilisation.read()),
    _Query(("mem_used_gib",), lambda gpu: readings.memory_used_gib(gpu.device)),
    _GPM,
    _POWER,
    _Query(("temp_c",), lambda gpu: readings.temperature_c(gpu.device)),
    _Query(("sm_clock_mhz",), lambda gpu: readings.clock_mhz(gpu.device, "SM")),
    _Query(("mem_clock_mhz",), lambda gpu: readings.clock_mhz(gpu.device, "MEM")),
    _Query(("power_limited", "heat_limited"), lambda gpu: readings.clock_limits(gpu.device)),
    # GPM has these two as well, and costs less.
    _Query(("pcie_rx_mb_s",), lambda gpu: readings.pcie_mb_s(gpu.device, "RX")),
    _Query(("pcie_tx_mb_s",), lambda gpu: readings.pcie_mb_s(gpu.device, "TX")),
)


class GpuSource(Source):
    """Source of readings of all GPUs of a run. Its thread may wait for the driver."""

    name = "gpu"

    def __init__(
        self,
        gpus: Sequence[WatchedGpu],
        on_event: OnEvent,
        *,
        session: Callable[[], NvmlSession] = NvmlSession,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched, self._on_event, self._new_session, self._now_s = gpus, on_event, session, now_s
        self._session: NvmlSession | None = None
        self._gpus: list[_Gpu] | None = None
        """GPUs that are not lost; None before the first reading."""

    def read(self, *, slow: bool, edge: bool = False) -> Iterator[Reading]:
        """Yields a reading of each available GPU as soon as it is taken; none if NVML can't be used."""
        if self._gpus is None:
            self._gpus = self._opened()
        for gpu in list(self._gpus):
            try:
                values = self._read(gpu, slow=slow, edge=edge)
            except NvmlError as error:  # other errors cost one figure
                self._lose(gpu.index, error)
                self._gpus.remove(gpu)
                gpu.gpm.close()
            else:
                yield Reading(gpu.index, values)

    def close(self) -> None:
        """Closes NVML."""
        for gpu in self._gpus or ():
            gpu.gpm.close()
        if self._session is not None:
            self._session.__exit__(None, None, None)
        self._session, self._gpus = None, []

    def _opened(self) -> list[_Gpu]:
        try:
            self._session = self._new_session().__enter__()
        except NvmlError as error:
            self._on_event("telemetry_trouble", trouble="refused", message=f"{error}. GPU figures are absent.")
            return []
        found = []
        for gpu in self._watched:
            try:
                found.append(_Gpu(gpu, self._session, self._now_s))
            except NvmlError as error:
                self._lose(gpu.index, error)
        return found

    def _read(self, gpu: _Gpu, *, slow: bool, edge: bool) -> dict[str, float]:
        """Returns values by metric name.

        Raises:
            NvmlError: the GPU is lost.
        """
        values: dict[str, float] = {}
        for query in _QUERIES:
            is_due = query is _POWER if edge else slow or not query.is_slow
            if query not in gpu.refused and (is_due or gpu.is_new) and not values.keys() >= set(query.names):
                for name, value in self._answer(gpu, query).items():
                    values.setdefault(name, value)
        gpu.is_new = False
        gpu.seen.update(values)
        self._report_absent(gpu)
        return values

    def _answer(self, gpu: _Gpu, query: _Query) -> Mapping[str, float]:
        try:
            answer = query.ask(gpu)
        except NvmlError as error:
            if error.is_lost:
                raise
            if error.code == NO_DATA:
                return {}
            if error.is_absent and query not in gpu.answered:
                gpu.refused[query] = error.reason
            elif "errors" not in gpu.reported:
                gpu.reported.add("errors")
                message = f"{error}. Where a call fails its figure is missing."
                self._event("telemetry_trouble", gpu.index, trouble="errors", message=message)
            return {}
        gpu.answered.add(query)
        return {query.names[0]: answer} if isinstance(answer, float) else answer

    def _report_absent(self, gpu: _Gpu) -> None:
        """Reports absent figures once no other query may still give them."""
        open_ = [query for query in _QUERIES if query not in gpu.refused and query not in gpu.answered]
        known = gpu.seen.union(gpu.reported, *(query.names for query in open_))
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        reasons = {_GPM: NvmlError("", NOT_SUPPORTED).reason} if _GPM in gpu.answered else {}
        for query, reason in {**reasons, **gpu.refused}.items():  # GPM may lack some of its figures
            by_reason[reason] += [name for name in query.names if name not in known]
        for reason, names in by_reason.items():
            if names:
                gpu.reported.update(names)
                self._event("metric_absent", gpu.index, metrics=names, reason=reason)

    def _lose(self, index: int, error: NvmlError) -> None:
        self._event("gpu_lost", index, message=f"{error}. Its figures are absent from here on.")

    def _event(self, kind: EventKind, index: int, **facts: object) -> None:
        self._on_event(kind, gpu=index, **facts)
