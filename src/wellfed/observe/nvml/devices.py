"""Lists the cards that NVML reports: physical cards and MIG instances, in NVML's (PCI bus) order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import psutil

from wellfed.observe.nvml.session import NOT_FOUND, NvmlError, NvmlSession
from wellfed.units import gib

Answer = TypeVar("Answer")
_PROCESS_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")


@dataclass(frozen=True)
class Holder:
    """A process that held memory of a device when queried."""

    pid: int
    """Process id on the host. Inside a container another process may have that id."""
    name: str | None
    """None if neither driver nor system reports it, as for a process of another container."""
    memory_gib: float | None
    """None if the driver does not report it (Windows' WDDM, some MIG instances)."""

    def describe(self) -> str:
        """Returns a text such as ``python (pid 4711, 20,480 MiB)``."""
        size = "size unknown" if self.memory_gib is None else f"{self.memory_gib * 1024:,.0f} MiB"
        return f"{self.name or 'a process'} (pid {self.pid}, {size})"


@dataclass(frozen=True)
class Device:
    """One card or MIG instance when queried. None = not reported by this device."""

    nvml_index: int
    """Number of the (parent) card in NVML's order."""
    uuid: str
    """``GPU-...`` or ``MIG-...``."""
    name: str
    memory_total_bytes: int | None
    """Memory for programs: physical memory minus the driver's reserve, close to torch's figure."""
    memory_used_bytes: int | None
    """Held by all processes, without the driver's reserve."""
    memory_free_bytes: int | None
    capability: tuple[int, int] | None
    """CUDA compute capability (major, minor)."""
    driver_version: str | None
    power_limit_w: float | None = None
    """Current power limit of the board."""
    is_mig: bool = False
    """An instance of a split card."""
    has_mig_mode: bool = False
    """A physical card in MIG mode. CUDA shows its instances instead."""
    index: int | None = None
    """CUDA-visible number; None until mapped, or if CUDA does not see it."""
    holders: tuple[Holder, ...] = ()
    """Processes with memory here, largest first."""


@dataclass(frozen=True)
class Devices:
    """A list of devices. Its order is documented by the function that returns it."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()
    """Remarks on unreadable or uncertain figures, one sentence each."""


class Memory(NamedTuple):
    """Memory in bytes; None if this device does not report it."""

    total: int | None
    """Without the driver's reserve."""
    used: int | None
    free: int | None


def list_devices(nvml: NvmlSession) -> Devices:
    """Returns every card in NVML's order, each followed by its MIG instances.

    A card or instance that is lost or refuses is left out with a note.

    Raises:
        NvmlError: the cards can't be counted.
    """
    driver = _offered(lambda: str(nvml.ask("nvmlSystemGetDriverVersion")))
    found: list[Device] = []
    notes: list[str] = []
    for nvml_index in range(nvml.ask("nvmlDeviceGetCount")):
        try:
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", nvml_index)
            mode = _offered(lambda: nvml.ask("nvmlDeviceGetMigMode", handle))  # noqa: B023  called at once
            capability = _offered(lambda: nvml.ask("nvmlDeviceGetCudaComputeCapability", handle))  # noqa: B023
            card = _device(
                nvml,
                handle,
                default_name="NVIDIA GPU",
                nvml_index=nvml_index,
                capability=None if capability is None else (int(capability[0]), int(capability[1])),
                driver_version=driver,
                has_mig_mode=mode is not None and mode[0] == 1,
            )
            found += [card, *(_mig_instances(nvml, handle, card, notes) if card.has_mig_mode else ())]
        except NvmlError as error:
            notes.append(f"card {nvml_index} is left out ({error}).")
    return Devices(tuple(found), tuple(notes))


def _device(nvml: NvmlSession, handle: Any, *, default_name: str, **known: Any) -> Device:
    """Returns a card or an instance; ``known`` are fields that need no query."""
    total, used, free = memory_bytes(nvml, handle)
    return Device(
        uuid=nvml.ask("nvmlDeviceGetUUID", handle),
        name=_offered(lambda: str(nvml.ask("nvmlDeviceGetName", handle))) or default_name,
        memory_total_bytes=total,
        memory_used_bytes=used,
        memory_free_bytes=free,
        power_limit_w=_power_limit_w(nvml, handle),
        holders=list_holders(nvml, handle),
        **known,
    )


def _mig_instances(nvml: NvmlSession, handle: Any, card: Device, notes: list[str]) -> Iterator[Device]:
    for slot in range(_offered(lambda: nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle)) or 0):
        try:
            yield _device(
                nvml,
                nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot),
                default_name=f"{card.name} MIG",
                nvml_index=card.nvml_index,
                capability=card.capability,  # NVML gives this for the parent only
                driver_version=card.driver_version,
                is_mig=True,
            )
        except NvmlError as error:
            if error.code != NOT_FOUND:  # an empty slot; later ones may be filled
                notes.append(f"instance {slot} of card {card.nvml_index} is left out ({error}).")


def memory_bytes(nvml: NvmlSession, handle: Any) -> Memory:
    """Returns the memory of a device; all None on cards that share the host's memory.

    Raises:
        NvmlError: the query failed for another reason than a missing figure.
    """
    version = nvml.constant("nvmlMemory_v2")
    info = _offered(lambda: nvml.ask("nvmlDeviceGetMemoryInfo", handle, version=version))
    if info is None:
        return Memory(None, None, None)
    return Memory(int(info.total) - int(info.reserved), int(info.used), int(info.free))


def list_holders(nvml: NvmlSession, handle: Any) -> tuple[Holder, ...]:
    """Returns the processes on a device, largest first. A process that computes and draws is listed once.

    The list is empty if the driver refuses or fails.
    """
    found: dict[int, int | None] = {}
    for function in _PROCESS_LISTS:
        with contextlib.suppress(NvmlError):
            for process in nvml.ask(function, handle):
                held = getattr(process, "usedGpuMemory", None)
                known = [size for size in (found.get(int(process.pid)), held) if size is not None]
                found[int(process.pid)] = max(map(int, known), default=None)
    by_size = sorted(found.items(), key=lambda entry: -(entry[1] or 0))
    return tuple(Holder(pid, _process_name(nvml, pid), None if held is None else gib(held)) for pid, held in by_size)


def _power_limit_w(nvml: NvmlSession, handle: Any) -> float | None:
    with contextlib.suppress(NvmlError):
        return float(nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle)) / 1e3
    return None


def _process_name(nvml: NvmlSession, pid: int) -> str | None:
    with contextlib.suppress(NvmlError, UnicodeDecodeError):  # ended since, in another container, or not allowed
        if found := str(nvml.ask("nvmlSystemGetProcessName", pid)).replace("\\", "/").rpartition("/")[2]:
            return found
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return None


def _offered(ask: Callable[[], Answer]) -> Answer | None:
    """Returns the answer; None if there is no such figure here."""
    try:
        return ask()
    except NvmlError as error:
        if error.is_absent:
            return None
        raise
