"""Reads GPU performance monitoring (Hopper and later): activity of the multiprocessors between two samples.

Needs no root and no daemon. https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from wellfed.observe.nvml.readings import OpenDevice
from wellfed.observe.nvml.session import NO_DATA, NOT_SUPPORTED, NvmlError
from wellfed.units import MIB

SHORTEST_S = 0.09
"""Minimum seconds between two samples. The counters update at most ten times a second
(https://github.com/NVIDIA/DCGM/issues/310)."""
FIGURES: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "sm_active_pct": ("NVML_GPM_METRIC_SM_UTIL", 1.0),
        "sm_occupancy_pct": ("NVML_GPM_METRIC_SM_OCCUPANCY", 1.0),
        "tensor_active_pct": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1.0),
        "dram_active_pct": ("NVML_GPM_METRIC_DRAM_BW_UTIL", 1.0),
        "pcie_rx_mb_s": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB / 1e6),
        "pcie_tx_mb_s": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB / 1e6),
    }
)
"""Our name -> the driver's name, and the factor from its unit (percent, MiB/s) to ours (percent, 10^6 bytes/s)."""


class Gpm:
    """Reader of means over the time since the last reading. ``close`` it before its session."""

    def __init__(self, device: OpenDevice, *, is_mig: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        self._device, self._is_mig, self._now_s = device, is_mig, now_s
        self._samples: list[Any] = []
        self._begun_at_s: float | None = None

    def read(self) -> dict[str, float]:
        """Returns the figures named in `FIGURES`; absent ones are left out.

        Raises:
            NvmlError: with the code `NO_DATA` if there is no earlier sample or it is too recent; absent if this device
                or driver has no such counters.
        """
        nvml = self._device.session
        if not self._samples and not nvml.ask("nvmlGpmQueryDeviceSupport", self._card()).isSupportedDevice:
            raise NvmlError("nvmlGpmQueryDeviceSupport", NOT_SUPPORTED)
        while len(self._samples) < 2:
            self._samples.append(nvml.ask("nvmlGpmSampleAlloc"))
        before, after = self._samples
        if self._begun_at_s is None:
            self._take(before)
            # Timed after the call, since the driver may be slow.
            self._begun_at_s = self._now_s()
        if self._now_s() - self._begun_at_s < SHORTEST_S:
            raise NvmlError("nvmlGpmMetricsGet", NO_DATA)
        self._take(after)
        self._samples, self._begun_at_s = [after, before], self._now_s()
        return self._between(before, after)

    def close(self) -> None:
        """Frees the samples of the driver; after a loss of the device there may be none."""
        samples, self._samples, self._begun_at_s = self._samples, [], None
        for sample in samples:
            with contextlib.suppress(NvmlError):
                self._device.session.ask("nvmlGpmSampleFree", sample)

    def _card(self) -> Any:
        """Returns the physical card, which also has the counters of its instances."""
        if self._is_mig:
            return self._device.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
        return self._device.handle

    def _take(self, sample: Any) -> None:
        nvml = self._device.session
        if self._is_mig:
            nvml.ask("nvmlGpmMigSampleGet", self._card(), self._device.ask("nvmlDeviceGetGpuInstanceId"), sample)
        else:
            nvml.ask("nvmlGpmSampleGet", self._card(), sample)

    def _between(self, before: Any, after: Any) -> dict[str, float]:
        nvml = self._device.session
        request = nvml.constant("c_nvmlGpmMetricsGet_t")()
        request.version, request.numMetrics = nvml.constant("NVML_GPM_METRICS_GET_VERSION"), len(FIGURES)
        request.sample1, request.sample2 = before, after
        for place, (metric, _) in enumerate(FIGURES.values()):
            request.metrics[place].metricId = nvml.constant(metric)
        answer = nvml.ask("nvmlGpmMetricsGet", request)
        found = {}
        for place, (name, (_, factor)) in enumerate(FIGURES.items()):
            figure = answer.metrics[place]
            if figure.nvmlReturn == 0 and math.isfinite(figure.value):
                found[name] = float(figure.value) * factor
        if not found:
            raise NvmlError("nvmlGpmMetricsGet", NOT_SUPPORTED)
        return found
