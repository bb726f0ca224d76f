"""Reads figures of one device in our units, with few calls to the driver. Missing figures raise.

Every call blocks for as long as the driver takes. Meanings: https://docs.nvidia.com/deploy/nvml-api
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any, Literal

from wellfed.observe.nvml.devices import memory_bytes
from wellfed.observe.nvml.session import NO_DATA, NOT_SUPPORTED, NvmlError, NvmlSession
from wellfed.units import gib

POWER_WINDOW_S = 1.0
"""Minimum seconds that mean power is taken over. The energy counter steps every 0.1 s
(https://arxiv.org/abs/2312.02741), so shorter windows give zero or kilowatts."""

_VALUE_FIELDS = dict(enumerate(["dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"]))
"""nvmlValueType_t -> field of the value."""


class OpenDevice:
    """A device by its UUID, in one session."""

    def __init__(self, uuid: str, nvml: NvmlSession) -> None:
        """Finds the device.

        Raises:
            NvmlError: the device is missing.
        """
        self.session, self.handle = nvml, nvml.ask("nvmlDeviceGetHandleByUUID", uuid)

    def ask(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the answer of a device function; raises as `NvmlSession.ask` does."""
        return self.session.ask(function, self.handle, *args, **kwargs)


def memory_used_gib(device: OpenDevice) -> float:
    """Returns the memory held by all processes, without the driver's own reserve."""
    used = memory_bytes(device.session, device.handle).used
    if used is None:
        raise NvmlError("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    return gib(used)


def temperature_c(device: OpenDevice) -> float:
    """Returns the temperature of the GPU's die."""
    return float(device.ask("nvmlDeviceGetTemperature", device.session.constant("NVML_TEMPERATURE_GPU")))


def clock_mhz(device: OpenDevice, domain: Literal["SM", "MEM"]) -> float:
    """Returns the current clock."""
    return float(device.ask("nvmlDeviceGetClockInfo", device.session.constant(f"NVML_CLOCK_{domain}")))


def pcie_mb_s(device: OpenDevice, direction: Literal["RX", "TX"]) -> float:
    """Returns traffic in 10^6 bytes/s (RX = from the host). The driver blocks for 20 ms to measure it."""
    counter = device.session.constant(f"NVML_PCIE_UTIL_{direction}_BYTES")
    return float(device.ask("nvmlDeviceGetPcieThroughput", counter)) / 1e3


def clock_limits(device: OpenDevice) -> dict[str, float]:
    """Returns ``{power_limited, heat_limited}``: 1 if power or temperature holds the clocks down, else 0."""
    bits = int(device.ask("nvmlDeviceGetCurrentClocksEventReasons"))
    # HwSlowdown (0x8) may have either cause and is ignored.
    return {"power_limited": float(bits & (0x4 | 0x80) != 0), "heat_limited": float(bits & (0x20 | 0x40) != 0)}


class Utilisation:
    """Mean utilisation since the last reading, from the driver's samples or else its latest rate."""

    def __init__(self, device: OpenDevice, of: Literal["gpu", "memory"]) -> None:
        self._device, self._of = device, of
        self._has_samples = True
        self._seen_us = 0
        """Time of the latest sample; 0 before the first."""

    def read(self) -> float:
        """Returns the percentage of time.

        Raises:
            NvmlError: absent if neither samples nor rate are offered.
        """
        if self._has_samples and (fresh := self._fresh()):
            return fmean(fresh)
        return float(getattr(self._device.ask("nvmlDeviceGetUtilizationRates"), self._of))

    def _fresh(self) -> list[float]:
        """Returns the samples since the last reading; the latest alone at the first."""
        kind = self._device.session.constant(f"NVML_{self._of.upper()}_UTILIZATION_SAMPLES")
        try:
            value_type, samples = self._device.ask("nvmlDeviceGetSamples", kind, self._seen_us)
        except NvmlError as error:
            if error.is_lost:
                raise
            self._has_samples = error.code == NO_DATA or not error.is_absent
            return []
        field = _VALUE_FIELDS[value_type]
        found = sorted((int(one.timeStamp), float(getattr(one.sampleValue, field))) for one in samples)
        new = [value for stamp_us, value in found if stamp_us > self._seen_us]
        is_first, self._seen_us = self._seen_us == 0, max([self._seen_us, *(stamp_us for stamp_us, _ in found)])
        return new[-1:] if is_first else new


class Power:
    """Power, and the energy since the first reading. Uses the energy counter if there is one. The power sensors of A100
    and H100 cover a quarter of the time (https://arxiv.org/abs/2312.02741)."""

    def __init__(self, device: OpenDevice, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._device, self._now_s = device, now_s
        self._has_counter: bool | None = None
        """None until the driver has answered or refused."""
        self._last: tuple[float, float | None] | None = None
        self._energy_j = 0.0

    def read(self) -> dict[str, float]:
        """Returns ``{power_w, energy_j}``. Power is the mean since the last reading if the counter works, else the
        sensor's.

        power_w is left out if the first reading has no sensor, or if the last reading was too recent.

        Raises:
            NvmlError: absent if neither counter nor sensor is offered.
        """
        counter_j, at_s = self._counter_j(), self._now_s()
        last_s, last_j = self._last or (at_s, None)
        stretch_s = at_s - last_s
        # A counter that went back was reset with the driver. The sensor is used for this interval.
        if counter_j is not None and last_j is not None and counter_j >= last_j:
            spent_j = counter_j - last_j
            power_w = spent_j / stretch_s if stretch_s >= POWER_WINDOW_S else None
        else:
            power_w = self._sensor_w(is_needed=counter_j is None)
            spent_j = (power_w or 0.0) * stretch_s
        self._energy_j += spent_j
        self._last = (at_s, counter_j)
        return {"energy_j": self._energy_j} if power_w is None else {"power_w": power_w, "energy_j": self._energy_j}

    def _sensor_w(self, *, is_needed: bool) -> float | None:
        try:
            return float(self._device.ask("nvmlDeviceGetPowerUsage")) / 1e3
        except NvmlError as error:
            if is_needed or not error.is_absent:
                raise
            return None

    def _counter_j(self) -> float | None:
        if self._has_counter is False:
            return None
        try:
            counter_j = float(self._device.ask("nvmlDeviceGetTotalEnergyConsumption")) / 1e3
        except NvmlError as error:
            # A failure after an answer passes: the next reading covers a longer interval.
            if self._has_counter or not error.is_absent:
                raise
            self._has_counter = False
            return None
        self._has_counter = True
        return counter_j
