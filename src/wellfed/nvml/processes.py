"""Lists the processes that hold memory of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wellfed.nvml.session import GpuLostError, NvmlError, NvmlSession

_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")


@dataclass(frozen=True)
class Holder:
    """One process that has memory of a device."""

    pid: int
    """As the host counts; inside a container another process may have that number."""
    name: str | None
    """None where neither driver nor system tells, as for a process of another container."""
    memory_bytes: int | None
    """None where the driver does not say how much (Windows' WDDM, some MIG instances)."""


def list_holders(nvml: NvmlSession, handle: Any) -> tuple[Holder, ...]:
    """All of them, the largest first; a process that computes and draws is one.

    Where the driver does not tell, or stumbles over the question, there are none: no card is given up for this.

    Raises:
        GpuLostError: the device is gone.
    """
    found: dict[int, int | None] = {}
    for function in _LISTS:
        try:
            running = nvml.ask(function, handle)
        except GpuLostError:
            raise
        except NvmlError:
            continue
        for process in running:
            held = getattr(process, "usedGpuMemory", None)
            found[int(process.pid)] = max(found.get(int(process.pid)) or 0, int(held)) if held is not None else None
    by_size = sorted(found.items(), key=lambda entry: -(entry[1] or 0))
    return tuple(Holder(pid, _name(nvml, pid), held) for pid, held in by_size)


def _name(nvml: NvmlSession, pid: int) -> str | None:
    try:
        name = nvml.ask("nvmlSystemGetProcessName", pid)
    except NvmlError:  # gone since, of another container, or not ours to see
        return None
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return text.replace("\\", "/").rpartition("/")[2] or None
