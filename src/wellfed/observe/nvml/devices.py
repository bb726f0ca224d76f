"""Lists the cards that NVML reports: physical cards and MIG instances, in NVML's (PCI bus) order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from wellfed.observe.machine_facts import SIMULATED, GpuFacts, Holder
from wellfed.observe.nvml.session import NOT_FOUND, NvmlError, NvmlSession
from wellfed.units import gib

_PROCESS_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")


@dataclass(frozen=True)
class Devices:
    """A list of devices. Its order is documented by the function that returns it."""

    devices: tuple[GpuFacts, ...]
    notes: tuple[str, ...] = ()
    """Remarks on unreadable or uncertain figures, one sentence each."""
    driver: str | None = None
    """Version of the driver."""


class Memory(NamedTuple):
    """Memory in bytes; None if this device does not report it."""

    total: int | None
    """Without the driver's reserve."""
    used: int | None
    free: int | None


def list_devices(nvml: NvmlSession) -> Devices:
    """Returns every card in NVML's order, which is also its ``index``, each followed by its MIG instances.

    A card or instance that is lost or refuses is left out with a note.

    Raises:
        NvmlError: the cards can't be counted.
    """
    driver = _offered(nvml, "nvmlSystemGetDriverVersion")
    found: list[GpuFacts] = []
    notes: list[str] = []
    for nvml_index in range(nvml.ask("nvmlDeviceGetCount")):
        try:
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", nvml_index)
            mode = _offered(nvml, "nvmlDeviceGetMigMode", handle)
            capability = _offered(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
            card = _device(
                nvml,
                handle,
                default_name="NVIDIA GPU",
                nvml_index=nvml_index,
                capability=None if capability is None else f"{capability[0]}.{capability[1]}",
                has_mig_mode=mode is not None and mode[0] == 1,
            )
            found += [card, *(_mig_instances(nvml, handle, card, notes) if card.has_mig_mode else ())]
        except NvmlError as error:
            notes.append(f"card {nvml_index} is left out ({error}).")
    return Devices(tuple(found), tuple(notes), None if driver is None else str(driver))


def _device(nvml: NvmlSession, handle: Any, *, default_name: str, nvml_index: int, **known: Any) -> GpuFacts:
    """Returns a card or an instance; ``known`` are fields that need no query."""
    memory = memory_bytes(nvml, handle)
    limit_mw = _offered(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)
    name = str(_offered(nvml, "nvmlDeviceGetName", handle) or default_name)
    return GpuFacts(
        index=nvml_index,
        uuid=nvml.ask("nvmlDeviceGetUUID", handle),
        name=name,
        memory_gib=None if memory.total is None else gib(memory.total),
        free_gib=None if memory.free is None else gib(memory.free),
        nvml_index=nvml_index,
        power_limit_w=None if limit_mw is None else float(limit_mw) / 1e3,
        is_simulated=name.startswith(SIMULATED),
        holders=list_holders(nvml, handle),
        **known,
    )


def _mig_instances(nvml: NvmlSession, handle: Any, card: GpuFacts, notes: list[str]) -> Iterator[GpuFacts]:
    for slot in range(_offered(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        try:
            instance, name = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot), f"{card.name} MIG"
            own = {"capability": card.capability, "is_mig": True}  # NVML gives the capability for the parent only
            yield _device(nvml, instance, default_name=name, nvml_index=card.index, **own)
        except NvmlError as error:
            if error.code != NOT_FOUND:  # an empty slot; later ones may be filled
                notes.append(f"instance {slot} of card {card.index} is left out ({error}).")


def memory_bytes(nvml: NvmlSession, handle: Any) -> Memory:
    """Returns the memory of a device; all None on cards that share the host's memory.

    Raises:
        NvmlError: the query failed for another reason than a missing figure.
    """
    info = _offered(nvml, "nvmlDeviceGetMemoryInfo", handle, version=nvml.constant("nvmlMemory_v2"))
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


def _process_name(nvml: NvmlSession, pid: int) -> str | None:
    with contextlib.suppress(NvmlError, UnicodeDecodeError):  # ended since, in another container, or not allowed
        if found := str(nvml.ask("nvmlSystemGetProcessName", pid)).replace("\\", "/").rpartition("/")[2]:
            return found
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return None


def _offered(nvml: NvmlSession, function: str, *args: Any, **kwargs: Any) -> Any:
    """Returns the answer; None if there is no such figure here."""
    try:
        return nvml.ask(function, *args, **kwargs)
    except NvmlError as error:
        if error.is_absent:
            return None
        raise
