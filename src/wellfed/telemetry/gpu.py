"""The GPUs of a run: which figures each offers, reading them, and what to do when one is lost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from wellfed.nvml import readings
from wellfed.nvml.gpm import FIGURES as GPM_FIGURES
from wellfed.nvml.gpm import Gpm
from wellfed.nvml.readings import CONFIRMING_TRIES, Offer, OpenDevice
from wellfed.nvml.session import (
    GpuLostError,
    NoDataError,
    NotSupportedError,
    NvmlAbsentError,
    NvmlError,
    NvmlSession,
)
from wellfed.telemetry.metrics import Rate
from wellfed.telemetry.source import Reading, Tell

RETRY_S, LONGEST_RETRY_S = 10.0, 300.0
"""Seconds until the first and between later attempts to get a lost GPU back. Each starts NVML anew, which takes the
other GPUs' figures away for a moment: so the pause doubles."""
MOST_EVENTS = 5
"""A GPU that keeps coming and going is told of so often, and no more."""


@dataclass(frozen=True)
class WatchedGpu:
    """A GPU to watch."""

    index: int
    """CUDA-visible number, under which its figures are published."""
    uuid: str
    is_mig: bool = False


@dataclass
class _Reader:
    """One question to the driver, and what its answer is called."""

    names: tuple[str, ...]
    rate: Rate
    read: Callable[[], Mapping[str, float]]
    offer: Offer = field(default_factory=Offer)


class GpuSource:
    """Reads all GPUs of a run, one after the other. To be used by one thread, which may be held up by the driver."""

    name = "gpu"

    def __init__(
        self,
        gpus: Sequence[WatchedGpu],
        tell: Tell,
        *,
        session: Callable[[], NvmlSession] = NvmlSession,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = [_Gpu(gpu, tell, now_s) for gpu in gpus]
        self._tell, self._new_session, self._now_s = tell, session, now_s
        self._session: NvmlSession | None = None
        self._retry_at_s, self._retry_s = -math.inf, RETRY_S
        self._is_refusal_told = False

    @property
    def waits_for_step_end(self) -> bool:
        """Some figures are means between two readings: best taken where steps end."""
        return any(gpu.has_gpm for gpu in self._gpus)

    def read(self, *, slow: bool, edge: bool = False) -> Iterator[Reading]:
        """A reading of each GPU that is there, as soon as it is there; none where NVML can't be used."""
        now_s = self._now_s()
        if self._session is not None and not any(gpu.is_lost for gpu in self._gpus):
            self._retry_s, self._retry_at_s = RETRY_S, now_s + RETRY_S
        elif now_s >= self._retry_at_s:
            self.close()
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            self._retry_at_s = now_s + self._retry_s
            self._open()
        if self._session is None:
            return
        for gpu in self._gpus:
            if (values := gpu.read(slow=slow, edge=edge)) is not None:
                yield Reading(gpu.index, values)

    def close(self) -> None:
        """Give NVML back."""
        session, self._session = self._session, None
        if session is not None:
            for gpu in self._gpus:
                gpu.close()
            session.__exit__(None, None, None)

    def _open(self) -> None:
        session = self._new_session()
        session.tries = CONFIRMING_TRIES
        try:
            self._session = session.__enter__()
        except NvmlError as error:
            # While a GPU is lost the driver may refuse altogether for a while.
            if not (self._is_refusal_told or any(gpu.is_lost for gpu in self._gpus)):
                self._is_refusal_told = True
                self._tell("telemetry_trouble", trouble="refused", message=f"{error}. GPU figures are absent.")
            return
        for gpu in self._gpus:
            gpu.open(session)
        session.tries = 1  # from here on a stumble is one figure less


class _Gpu:
    """One GPU. What it does not offer is found out once, and told once."""

    def __init__(self, gpu: WatchedGpu, tell: Tell, now_s: Callable[[], float]) -> None:
        self.index, self._tell = gpu.index, tell
        self.is_lost = False
        self._device = device = OpenDevice(gpu.uuid)
        self._gpm = Gpm(device, is_mig=gpu.is_mig, now_s=now_s)
        self._power = readings.Power(device, now_s=now_s)
        self._utilisation = readings.Utilisation(device, "gpu", now_s=now_s)
        memory_utilisation = readings.Utilisation(device, "memory", now_s=now_s)
        self._gpm_reader = _Reader(tuple(GPM_FIGURES), "fast", self._read_gpm)
        self._power_reader = _Reader(("power_w", "energy_j"), "slow", self._power.read)
        self._readers = [
            _figure("util_pct", "fast", self._utilisation.read),
            _figure("mem_util_pct", "fast", memory_utilisation.read),
            _figure("mem_used_gib", "fast", partial(readings.memory_used_gib, device)),
            self._gpm_reader,
            self._power_reader,
            _figure("temp_c", "slow", partial(readings.temperature_c, device)),
            _figure("sm_clock_mhz", "slow", partial(readings.clock_mhz, device, "SM")),
            _figure("mem_clock_mhz", "slow", partial(readings.clock_mhz, device, "MEM")),
            _Reader(("power_limited", "heat_limited"), "slow", self._read_limits),
            _figure("pcie_rx_mb_s", "slow", partial(readings.pcie_mb_s, device, "RX")),
            _figure("pcie_tx_mb_s", "slow", partial(readings.pcie_mb_s, device, "TX")),
        ]
        self._was_read = False
        self._seen: set[str] = set()
        self._untold: dict[str, str] = {}
        self._told: dict[str, int] = {}

    @property
    def has_gpm(self) -> bool:
        """Its multiprocessors can be watched."""
        return self._gpm_reader.offer.is_proven and not self.is_lost

    def open(self, nvml: NvmlSession) -> None:
        """Find it, at first or again."""
        was_lost = self.is_lost
        try:
            self._device.open(nvml)
        except NvmlError as error:
            self._lose(error)
            return
        if was_lost and not self._device.is_there():  # a handle may be had of a GPU that is still away
            return
        self.is_lost = False
        if was_lost:
            self._say("gpu_back")

    def read(self, *, slow: bool, edge: bool) -> dict[str, float] | None:
        """By metric name; None when it is not there. The first reading asks for everything, at an edge or not."""
        if self.is_lost:
            return None
        values: dict[str, float] = {}
        for reader in list(self._readers):
            is_due = reader is self._power_reader if edge else reader.rate == "fast" or slow
            if (is_due or not self._was_read) and not self._ask(reader, values):
                return None
        self._was_read = True
        self._tell_absent()
        if self._utilisation.stumble is not None:
            self._stumbled(self._utilisation.stumble)
        if self._utilisation.is_stale:
            self._say(
                "telemetry_trouble",
                most=1,
                trouble="stale",
                message="the driver's utilisation samples stand still; its latest rate is taken instead.",
            )
        return values

    def close(self) -> None:
        """Before the session ends."""
        self._gpm.close()

    def _ask(self, reader: _Reader, values: dict[str, float]) -> bool:
        """Add the reader's figures; whether the GPU is still there."""
        if all(name in values for name in reader.names):  # GPM has told already, and cheaper
            return True
        self._device.session.tries = 1 if reader.offer.is_proven else CONFIRMING_TRIES
        try:
            answer = reader.read()
        except NoDataError:
            pass
        except NvmlAbsentError as error:
            if reader.offer.is_proven:
                self._stumbled(error)
            else:
                self._readers.remove(reader)
                self._untold.update(dict.fromkeys(reader.names, error.reason))
        except NvmlError as error:
            if isinstance(error, GpuLostError) and not self._device.is_there():
                self._lose(error)
                return False
            self._stumbled(error)
        else:
            reader.offer.answered()
            values.update({name: value for name, value in answer.items() if name not in values})
            self._seen.update(answer)
        finally:
            self._device.session.tries = 1
        return True

    def _stumbled(self, error: NvmlError) -> None:
        self._say(
            "telemetry_trouble",
            most=1,
            trouble="errors",
            message=f"{error}. Where a call fails its figure is missing.",
        )

    def _tell_absent(self) -> None:
        """Once it is known of everything; a figure that another reader gives, or may give yet, is not absent."""
        hoped = {name for reader in self._readers if not reader.offer.is_proven for name in reader.names}
        by_reason: dict[str, list[str]] = {}
        for name in [name for name in self._untold if name not in hoped]:
            reason = self._untold.pop(name)
            if name not in self._seen:
                by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            self._say("metric_absent", metrics=names, reason=reason)

    def _read_gpm(self) -> dict[str, float]:
        figures = self._gpm.read()
        if not self._gpm_reader.offer.is_proven:  # a device may lack some of them
            lacking = [name for name in GPM_FIGURES if name not in figures]
            self._untold.update({name: NotSupportedError.reason for name in lacking if name not in self._untold})
        return figures

    def _read_limits(self) -> dict[str, float]:
        limits = readings.clock_limits(self._device)
        return {"power_limited": float(limits.power), "heat_limited": float(limits.heat)}

    def _lose(self, error: NvmlError) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._say("gpu_lost", message=f"{error}. Its figures are absent until it is back.")

    def _say(self, kind: str, *, most: int = MOST_EVENTS, **facts: object) -> None:
        key = f"{kind} {facts.get('trouble') or facts.get('reason')}"
        self._told[key] = self._told.get(key, 0) + 1
        if self._told[key] <= most:
            self._tell(kind, gpu=self.index, **facts)


def _figure(name: str, rate: Rate, read: Callable[[], float]) -> _Reader:
    return _Reader((name,), rate, lambda: {name: read()})
