"""Reads figures of one device in our units. Each asks the driver as rarely as it can; what is refused raises.

Every call blocks for as long as the driver takes. Meanings: https://docs.nvidia.com/deploy/nvml-api
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any, Literal

from wellfed.observe.nvml.devices import memory_bytes
from wellfed.observe.nvml.session import (
    GpuLostError,
    NoDataError,
    NotFoundError,
    NotSupportedError,
    NvmlAbsentError,
    NvmlError,
    NvmlSession,
)
from wellfed.units import gib

STALE_S = 5.0
"""The driver's buffer holds a sample at least once a second; one without news for so long is not believed."""
_OTHER_EPOCH_S = 3600.0
"""Timestamps further off than this are not of the epoch; then only their order says anything."""
POWER_WINDOW_S = 1.0
"""The least time that a mean is taken over. The counter moves in steps, as the sensors do every 0.1 s
(https://arxiv.org/abs/2312.02741): over a few milliseconds it shows nothing or kilowatts."""

_VALUE_FIELDS = dict(enumerate(["dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"]))
"""nvmlValueType_t -> field of the value."""
CONFIRMING_TRIES = 3
"""Tries before an error ends the watching of a device."""


class OpenDevice:
    """A device by its UUID, reached through the current session."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.handle: Any = None
        self._nvml: NvmlSession | None = None

    def is_there(self) -> bool:
        """Returns whether the driver still has it; asks again if the call fails."""
        tries, self.session.tries = self.session.tries, CONFIRMING_TRIES
        try:
            self.ask("nvmlDeviceGetUUID")
        except NvmlError:
            return False
        finally:
            self.session.tries = tries
        return True

    def open(self, nvml: NvmlSession) -> None:
        """Finds it in this session.

        Raises:
            NotFoundError: it is not there.
        """
        self.handle = nvml.ask("nvmlDeviceGetHandleByUUID", self.uuid)
        self._nvml = nvml

    @property
    def session(self) -> NvmlSession:
        """Returns the session it was opened in."""
        assert self._nvml is not None
        return self._nvml

    def ask(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the answer of a device function; raises as `NvmlSession.ask` does."""
        assert self._nvml is not None
        return self._nvml.ask(function, self.handle, *args, **kwargs)


def memory_used_gib(device: OpenDevice) -> float:
    """Returns the memory held by all processes, without the driver's own reserve."""
    used = memory_bytes(device.session, device.handle).used
    if used is None:
        raise NotSupportedError("nvmlDeviceGetMemoryInfo")
    return gib(used)


def temperature_c(device: OpenDevice) -> float:
    """Returns the temperature of the GPU's die."""
    sensor = device.session.constant("NVML_TEMPERATURE_GPU")
    try:
        return float(device.ask("nvmlDeviceGetTemperatureV", sensor))
    except NvmlAbsentError:  # drivers before 570
        return float(device.ask("nvmlDeviceGetTemperature", sensor))


def clock_mhz(device: OpenDevice, domain: Literal["SM", "MEM"]) -> float:
    """Returns the current clock."""
    return float(device.ask("nvmlDeviceGetClockInfo", device.session.constant(f"NVML_CLOCK_{domain}")))


def pcie_mb_s(device: OpenDevice, direction: Literal["RX", "TX"]) -> float:
    """Returns traffic in 10^6 bytes/s (RX = from the host); the driver blocks for 20 ms to measure it."""
    counter = device.session.constant(f"NVML_PCIE_UTIL_{direction}_BYTES")
    return float(device.ask("nvmlDeviceGetPcieThroughput", counter)) / 1e3


def clock_limits(device: OpenDevice) -> dict[str, float]:
    """Returns ``{power_limited, heat_limited}``: 1 if power or temperature holds the clocks down, else 0."""
    try:
        bits = int(device.ask("nvmlDeviceGetCurrentClocksEventReasons"))
    except NvmlAbsentError:  # drivers before 535
        bits = int(device.ask("nvmlDeviceGetCurrentClocksThrottleReasons"))
    # The bits have had their values since R352, under two names. HwSlowdown (0x8) has either cause: it counts as none.
    return {"power_limited": float(bits & (0x4 | 0x80) != 0), "heat_limited": float(bits & (0x20 | 0x40) != 0)}


class Utilisation:
    """Mean utilisation since the reading before, from the samples that the driver keeps; else its latest rate."""

    def __init__(
        self,
        device: OpenDevice,
        of: Literal["gpu", "memory"],
        *,
        now_s: Callable[[], float] = time.monotonic,
        epoch_s: Callable[[], float] = time.time,
    ) -> None:
        self._device, self._of, self._now_s, self._epoch_s = device, of, now_s, epoch_s
        self._has_buffer: bool | None = None
        """None until the driver has answered or refused; once it has answered, it has one."""
        self._seen_us: int | None = None
        self._quiet_since_s: float | None = None
        self._is_given_up = False
        self.is_stale = False
        """The driver's samples stood still and are no longer asked for."""
        self.stumble: NvmlError | None = None
        """The latest failure to get at the driver's samples; its latest rate has stood in."""

    def read(self) -> float:
        """Returns the percentage of time.

        Raises:
            NoDataError: nothing new since the reading before, and no rate to fall back on.
            NvmlAbsentError: not offered.
        """
        asks_buffer = not self._is_given_up and self._has_buffer is not False
        if asks_buffer and (fresh := self._fresh()):
            return fmean(fresh)
        try:
            return float(getattr(self._device.ask("nvmlDeviceGetUtilizationRates"), self._of))
        except NvmlAbsentError as absent:
            if asks_buffer and self._has_buffer:
                raise NoDataError("nvmlDeviceGetSamples") from absent
            raise

    def _fresh(self) -> list[float]:
        try:
            samples = self._samples()
        except NvmlAbsentError:
            self._has_buffer = self._has_buffer or False
            return []
        except GpuLostError:
            raise
        except NvmlError as error:
            self.stumble = error
            return []
        self._has_buffer = True
        now_s, epoch_s = self._now_s(), self._epoch_s()
        seen_us, first = self._seen_us or 0, self._seen_us is None
        current = [each for each in samples if not STALE_S < epoch_s - each[0] / 1e6 < _OTHER_EPOCH_S]
        new = [(stamp_us, value) for stamp_us, value in current if stamp_us > seen_us]
        if new:
            self._seen_us, self._quiet_since_s = max(new)[0], None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s > STALE_S:
            self._is_given_up, self.is_stale = True, bool(samples)
        # At first the buffer covers a time before the first reading.
        return [max(new)[1]] if new and first else [value for _, value in new]

    def _samples(self) -> list[tuple[int, float]]:
        kind = self._device.session.constant(f"NVML_{self._of.upper()}_UTILIZATION_SAMPLES")
        try:
            value_type, samples = self._device.ask("nvmlDeviceGetSamples", kind, self._seen_us or 0)
        except (NotFoundError, NoDataError):  # none since
            return []
        if (field := _VALUE_FIELDS.get(value_type)) is None:
            raise NotSupportedError("nvmlDeviceGetSamples")
        return [(int(sample.timeStamp), float(getattr(sample.sampleValue, field))) for sample in samples]


class Power:
    """Power, and the energy since the first reading.

    From the energy counter where there is one: the sensors of A100 and H100 look at a quarter of the time
    (https://arxiv.org/abs/2312.02741).
    """

    def __init__(self, device: OpenDevice, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._device, self._now_s = device, now_s
        self._has_counter: bool | None = None
        """None until the driver has answered or refused."""
        self._last: tuple[float, float | None] | None = None
        self._energy_j = 0.0

    def read(self) -> dict[str, float]:
        """Returns ``{power_w, energy_j}``: mean power since the reading before, else the sensor's; then the energy.

        Without power_w where there is no sensor to begin with, or the reading before was too recent.

        Raises:
            NvmlAbsentError: neither counter nor sensor is offered.
        """
        counter_j, at_s = self._counter_j(), self._now_s()
        last_s, last_j = self._last or (at_s, None)
        stretch_s = at_s - last_s
        # A counter that went back was reset with the driver; the stretch is the sensor's then.
        if counter_j is not None and last_j is not None and counter_j >= last_j:
            spent_j = counter_j - last_j
            power_w = spent_j / stretch_s if stretch_s >= POWER_WINDOW_S else None
        else:
            power_w = None
            try:
                power_w = float(self._device.ask("nvmlDeviceGetPowerUsage")) / 1e3
            except NvmlAbsentError:
                if counter_j is None:
                    raise
            spent_j = (power_w or 0.0) * stretch_s
        self._energy_j += spent_j
        self._last = (at_s, counter_j)
        return {"energy_j": self._energy_j} if power_w is None else {"power_w": power_w, "energy_j": self._energy_j}

    def _counter_j(self) -> float | None:
        if self._has_counter is False:
            return None
        try:
            counter_j = float(self._device.ask("nvmlDeviceGetTotalEnergyConsumption")) / 1e3
        except NvmlAbsentError:
            if self._has_counter:  # it stumbled: the next reading is over a longer stretch
                raise
            self._has_counter = False
            return None
        self._has_counter = True
        return counter_j
