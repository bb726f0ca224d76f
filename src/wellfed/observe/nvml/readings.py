"""Reads figures of one device in our units, with few calls to the driver. Missing figures raise.

Every call blocks for as long as the driver takes. Meanings: https://docs.nvidia.com/deploy/nvml-api
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from wellfed.observe.nvml.devices import memory_bytes
from wellfed.observe.nvml.session import NOT_SUPPORTED, NvmlError, NvmlSession
from wellfed.units import gib

POWER_WINDOW_S = 1.0
"""Minimum seconds that mean power is taken over. The energy counter steps every 0.1 s
(https://arxiv.org/abs/2312.02741), so shorter windows give zero or kilowatts."""


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

    def number(self, function: str, constant: str) -> float:
        """Returns a number that is asked for with a constant of pynvml; raises as `NvmlSession.ask` does."""
        return float(self.ask(function, self.session.constant(constant)))


def memory_used_gib(device: OpenDevice) -> float:
    """Returns the memory held by all processes, without the driver's own reserve."""
    used = memory_bytes(device.session, device.handle).used
    if used is None:
        raise NvmlError("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    return gib(used)


def utilisation(device: OpenDevice) -> dict[str, float]:
    """Returns ``{util_pct, mem_util_pct}``, over the driver's latest period of up to a second."""
    rates = device.ask("nvmlDeviceGetUtilizationRates")
    return {"util_pct": float(rates.gpu), "mem_util_pct": float(rates.memory)}


def clock_limits(device: OpenDevice) -> dict[str, float]:
    """Returns ``{power_limited, heat_limited}``: 1 if power or temperature holds the clocks down, else 0."""
    bits = int(device.ask("nvmlDeviceGetCurrentClocksEventReasons"))
    # HwSlowdown (0x8) may have either cause and is ignored.
    return {"power_limited": float(bits & (0x4 | 0x80) != 0), "heat_limited": float(bits & (0x20 | 0x40) != 0)}


def pcie_mb_s(device: OpenDevice, counter: str) -> float:
    """Returns 10^6 bytes/s over the bus in one direction; the driver takes 20 ms to measure it."""
    return device.number("nvmlDeviceGetPcieThroughput", counter) / 1e3  # it counts in kB/s


class Power:
    """Power, and the energy since the first reading. Uses the energy counter if there is one. The power sensors of A100
    and H100 cover a quarter of the time (https://arxiv.org/abs/2312.02741)."""

    def __init__(self, device: OpenDevice, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._device, self._now_s = device, now_s
        self._has_counter: bool | None = None
        """None until the driver has answered or refused."""
        self._last: tuple[float, float | None] | None = None
        """Time and counter of the last reading."""
        self._energy_j = 0.0

    def read(self) -> dict[str, float]:
        """Returns ``{power_w, energy_j}``. Power is the mean since the last reading if the counter works, else the
        sensor's.

        power_w is left out if the first reading has no sensor, or if the last reading was too recent.

        Raises:
            NvmlError: absent if neither counter nor sensor is offered.
        """
        counter_j, at_s = self._counter_j(), self._now_s()
        last_s, last_j = self._last or (at_s, counter_j)
        stretch_s, power_w, spent_j = at_s - last_s, None, 0.0
        if counter_j is not None and self._last is not None and last_j is not None:
            spent_j = max(0.0, counter_j - last_j)  # a driver that was loaded again starts at 0
            power_w = spent_j / stretch_s if stretch_s >= POWER_WINDOW_S else None
        else:
            try:
                power_w = float(self._device.ask("nvmlDeviceGetPowerUsage")) / 1e3
                spent_j = power_w * stretch_s
            except NvmlError as error:
                if counter_j is None or not error.is_absent:
                    raise
        self._energy_j, self._last = self._energy_j + spent_j, (at_s, counter_j)
        return {"energy_j": self._energy_j} if power_w is None else {"power_w": power_w, "energy_j": self._energy_j}

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
