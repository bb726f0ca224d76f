"""Reads the GPUs of a run, and detects which figures each offers. A lost GPU is reported and no longer read."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.nvml import gpm, readings
from wellfed.observe.nvml.session import NO_DATA, NvmlError, NvmlSession
from wellfed.observe.telemetry.metrics import SLOW_METRICS
from wellfed.observe.telemetry.series import Reading, Source
from wellfed.record.entries import EventKind, OnEvent

Ask = Callable[[], float | Mapping[str, float]]
_POWER = ("power_w", "energy_j")
"""Counted over time, so they are also read when training begins or ends."""


class _Gpu:
    """One GPU: its queries that the driver has not refused, each by the names of the figures that it may give."""

    def __init__(self, gpu: GpuFacts, nvml: NvmlSession, now_s: Callable[[], float]) -> None:
        device = readings.OpenDevice(gpu.uuid or "", nvml)
        self.index, self.gpm = gpu.index, gpm.Gpm(device, is_mig=gpu.is_mig, now_s=now_s)
        self.queries: dict[tuple[str, ...], Ask] = {
            ("util_pct", "mem_util_pct"): partial(readings.utilisation, device),
            ("mem_used_gib",): partial(readings.memory_used_gib, device),
            tuple(gpm.FIGURES): self.gpm.read,
            _POWER: readings.Power(device, now_s=now_s).read,
            ("temp_c",): partial(device.number, "nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
            ("sm_clock_mhz",): partial(device.number, "nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            ("mem_clock_mhz",): partial(device.number, "nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
            ("power_limited", "heat_limited"): partial(readings.clock_limits, device),
            # GPM has these two as well, and costs less. The driver takes 20 ms to measure each.
            ("pcie_rx_mb_s",): partial(readings.pcie_mb_s, device, "NVML_PCIE_UTIL_RX_BYTES"),
            ("pcie_tx_mb_s",): partial(readings.pcie_mb_s, device, "NVML_PCIE_UTIL_TX_BYTES"),
        }
        self.answered: set[tuple[str, ...]] = set()
        self.is_new = True
        """Nothing was read yet: the first reading makes every query."""
        self.has_failed = False
        """A failed call was reported."""

    def refuse(self, names: tuple[str, ...]) -> list[str]:
        """Drops a query; returns the figures that no other query may give."""
        del self.queries[names]
        return [name for name in names if not any(name in others for others in self.queries)]


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
        for names, ask in list(gpu.queries.items()):
            is_due = names == _POWER if edge else slow or not SLOW_METRICS.issuperset(names)
            if not (is_due or gpu.is_new) or values.keys() >= set(names):
                continue
            try:
                answer = ask()
            except NvmlError as error:
                if error.is_lost:
                    raise
                if error.is_absent and error.code != NO_DATA and names not in gpu.answered:
                    absent[error.reason] += gpu.refuse(names)
                elif error.code != NO_DATA and not gpu.has_failed:
                    gpu.has_failed = True
                    message = f"{error}. Where a call fails its figure is missing."
                    self._event("telemetry_trouble", gpu.index, trouble="errors", message=message)
                continue
            gpu.answered.add(names)
            values = {**({names[0]: answer} if isinstance(answer, float) else answer), **values}
        gpu.is_new = False
        for reason, missing in absent.items():
            if missing:
                self._event("metric_absent", gpu.index, metrics=missing, reason=reason)
        return values

    def _lose(self, index: int, error: NvmlError) -> None:
        self._event("gpu_lost", index, message=f"{error}. Its figures are absent from here on.")

    def _event(self, kind: EventKind, index: int, **facts: object) -> None:
        self._on_event(kind, gpu=index, **facts)
