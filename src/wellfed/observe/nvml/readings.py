"""Reads figures of one device in our units, with few calls to the driver. Missing figures raise.

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
"""Seconds without a new sample after which the driver's buffer is ignored. A working driver adds one each second."""
_OTHER_EPOCH_S = 3600.0
"""Timestamps further off than this do not count from the epoch. Then only their order is used."""
POWER_WINDOW_S = 1.0
"""Minimum seconds that mean power is taken over. The energy counter steps every 0.1 s
(https://arxiv.org/abs/2312.02741), so shorter windows give zero or kilowatts."""

_VALUE_FIELDS = dict(enumerate(["dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"]))
"""nvmlValueType_t -> field of the value."""
CONFIRMING_TRIES = 3
"""Tries before an error counts as the loss of a device or figure."""


class OpenDevice:
    """A device by its UUID, reached through the current session."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.handle: Any = None
        self._nvml: NvmlSession | None = None

    def is_there(self) -> bool:
        """Returns whether the driver still has the device; retries a failed call."""
        tries, self.session.tries = self.session.tries, CONFIRMING_TRIES
        try:
            self.ask("nvmlDeviceGetUUID")
        except NvmlError:
            return False
        finally:
            self.session.tries = tries
        return True

    def open(self, nvml: NvmlSession) -> None:
        """Finds the device in this session.

        Raises:
            NotFoundError: the device is missing.
        """
        self.handle = nvml.ask("nvmlDeviceGetHandleByUUID", self.uuid)
        self._nvml = nvml

    @property
    def session(self) -> NvmlSession:
        """The session it was opened in."""
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
    """Returns traffic in 10^6 bytes/s (RX = from the host). The driver blocks for 20 ms to measure it."""
    counter = device.session.constant(f"NVML_PCIE_UTIL_{direction}_BYTES")
    return float(device.ask("nvmlDeviceGetPcieThroughput", counter)) / 1e3


def clock_limits(device: OpenDevice) -> dict[str, float]:
    """Returns ``{power_limited, heat_limited}``: 1 if power or temperature holds the clocks down, else 0."""
    try:
        bits = int(device.ask("nvmlDeviceGetCurrentClocksEventReasons"))
    except NvmlAbsentError:  # drivers before 535
        bits = int(device.ask("nvmlDeviceGetCurrentClocksThrottleReasons"))
    # The bits have kept their values since R352, under two names. HwSlowdown (0x8) may have either cause and is
    # ignored.
    return {"power_limited": float(bits & (0x4 | 0x80) != 0), "heat_limited": float(bits & (0x20 | 0x40) != 0)}


class Utilisation:
    """Mean utilisation since the last reading, from the driver's samples or else its latest rate."""

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
        """None until the driver has answered or refused."""
        self._seen_us: int | None = None
        self._quiet_since_s: float | None = None
        self._is_given_up = False
        self.is_stale = False
        """The driver's samples stopped changing and are no longer read."""
        self.last_failure: NvmlError | None = None
        """Latest failure to read the driver's samples, if the rate was used instead."""

    def read(self) -> float:
        """Returns the percentage of time.

        Raises:
            NoDataError: nothing new since the last reading, and there is no rate to fall back on.
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
            self.last_failure = error
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
        # The first buffer covers time before the first reading, so only its latest sample counts.
        return [max(new)[1]] if new and first else [value for _, value in new]

    def _samples(self) -> list[tuple[int, float]]:
        kind = self._device.session.constant(f"NVML_{self._of.upper()}_UTILIZATION_SAMPLES")
        try:
            value_type, samples = self._device.ask("nvmlDeviceGetSamples", kind, self._seen_us or 0)
        except (NotFoundError, NoDataError):  # no new samples
            return []
        if (field := _VALUE_FIELDS.get(value_type)) is None:
            raise NotSupportedError("nvmlDeviceGetSamples")
        return [(int(sample.timeStamp), float(getattr(sample.sampleValue, field))) for sample in samples]


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
            NvmlAbsentError: neither counter nor sensor is offered.
        """
        counter_j, at_s = self._counter_j(), self._now_s()
        last_s, last_j = self._last or (at_s, None)
        stretch_s = at_s - last_s
        # A counter that went back was reset with the driver. The sensor is used for this interval.
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
            if self._has_counter:  # a passing failure: the next reading covers a longer interval
                raise
            self._has_counter = False
            return None
        self._has_counter = True
        return counter_j
