"""Reads the GPUs of a run, and detects which figures each offers. A lost GPU is reported and no longer read."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.nvml import gpm, readings
from wellfed.observe.nvml.session import NO_DATA, NOT_SUPPORTED, NvmlError, NvmlSession
from wellfed.observe.telemetry.metrics import SLOW_METRICS
from wellfed.observe.telemetry.series import Reading, Source
from wellfed.record.entries import EventKind, OnEvent


class _Gpu:
    """Readers of one GPU, which keep state between readings, and what is known of its queries."""

    def __init__(self, gpu: GpuFacts, nvml: NvmlSession, now_s: Callable[[], float]) -> None:
        self.index = gpu.index
        self.device = readings.OpenDevice(gpu.uuid or "", nvml)
        self.gpm = gpm.Gpm(self.device, is_mig=gpu.is_mig, now_s=now_s)
        self.power = readings.Power(self.device, now_s=now_s)
        self.is_new = True
        """Nothing was read yet: the first reading makes every query."""
        self.queries = list(_QUERIES)
        """Queries that this GPU has not refused."""
        self.answered: set[_Query] = set()
        self.has_failed = False
        """A failed call was reported."""


@dataclass(frozen=True, eq=False)
class _Query:
    """One query of the driver: the figures that it may give, and how to ask."""

    names: tuple[str, ...]
    ask: Callable[[_Gpu], float | Mapping[str, float]]

    @property
    def is_slow(self) -> bool:
        return SLOW_METRICS.issuperset(self.names)


def _pcie_mb_s(gpu: _Gpu, counter: str) -> float:
    return gpu.device.number("nvmlDeviceGetPcieThroughput", counter) / 1e3  # the driver counts in kB/s


_POWER = _Query(("power_w", "energy_j"), lambda gpu: gpu.power.read())
"""Counted over time, so it is also read when training begins or ends."""
_GPM = _Query(tuple(gpm.FIGURES), lambda gpu: gpu.gpm.read())
_QUERIES = (
    _Query(("util_pct", "mem_util_pct"), lambda gpu: readings.utilisation(gpu.device)),
    _Query(("mem_used_gib",), lambda gpu: readings.memory_used_gib(gpu.device)),
    _GPM,
    _POWER,
    _Query(("temp_c",), lambda gpu: gpu.device.number("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU")),
    _Query(("sm_clock_mhz",), lambda gpu: gpu.device.number("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")),
    _Query(("mem_clock_mhz",), lambda gpu: gpu.device.number("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM")),
    _Query(("power_limited", "heat_limited"), lambda gpu: readings.clock_limits(gpu.device)),
    # GPM has these two as well, and costs less. The driver takes 20 ms to measure each.
    _Query(("pcie_rx_mb_s",), lambda gpu: _pcie_mb_s(gpu, "NVML_PCIE_UTIL_RX_BYTES")),
    _Query(("pcie_tx_mb_s",), lambda gpu: _pcie_mb_s(gpu, "NVML_PCIE_UTIL_TX_BYTES")),
)


def _no_longer_offered(gpu: _Gpu, refused: _Query, names: Sequence[str]) -> list[str]:
    """Returns the figures that no other query may give."""
    others = {name for query in gpu.queries if query is not refused for name in query.names}
    return [name for name in names if name not in others]


class GpuSource(Source):
    """Source of readings of all GPUs of a run. Its thread may wait for the driver."""

    name = "gpu"

    def __init__(
        self,
        gpus: Sequence[GpuFacts],
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
        absent: defaultdict[str, list[str]] = defaultdict(list)
        for query in list(gpu.queries):
            is_due = query is _POWER if edge else slow or not query.is_slow
            if not (is_due or gpu.is_new) or values.keys() >= set(query.names):
                continue
            try:
                answer = query.ask(gpu)
            except NvmlError as error:
                if error.is_lost:
                    raise
                if error.is_absent and error.code != NO_DATA and query not in gpu.answered:
                    gpu.queries.remove(query)
                    absent[error.reason] += _no_longer_offered(gpu, query, query.names)
                elif error.code != NO_DATA and not gpu.has_failed:
                    gpu.has_failed = True
                    message = f"{error}. Where a call fails its figure is missing."
                    self._event("telemetry_trouble", gpu.index, trouble="errors", message=message)
                continue
            found = {query.names[0]: answer} if isinstance(answer, float) else answer
            if query is _GPM and query not in gpu.answered:  # it may lack some of its figures
                lacking = [name for name in query.names if name not in found]
                absent[NvmlError("", NOT_SUPPORTED).reason] += _no_longer_offered(gpu, query, lacking)
            gpu.answered.add(query)
            values = {**found, **values}
        gpu.is_new = False
        for reason, names in absent.items():
            if names:
                self._event("metric_absent", gpu.index, metrics=names, reason=reason)
        return values

    def _lose(self, index: int, error: NvmlError) -> None:
        self._event("gpu_lost", index, message=f"{error}. Its figures are absent from here on.")

    def _event(self, kind: EventKind, index: int, **facts: object) -> None:
        self._on_event(kind, gpu=index, **facts)
