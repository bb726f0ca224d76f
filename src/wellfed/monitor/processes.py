"""Finds the processes that hold memory of a GPU: id, user, memory, name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.nvml.devices import Holder, list_holders
from wellfed.observe.nvml.session import NvmlError, NvmlSession
from wellfed.observe.telemetry.series import Reading, Source
from wellfed.units import gib, show_line

CHANGE_GIB = 0.25
"""Change of used memory in GiB after which processes are listed again. Any CUDA process takes more."""


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU."""

    holder: Holder
    user: str
    """Empty if unknown, as in a container."""

    @property
    def memory(self) -> str:
        """Memory as a cell."""
        return "-" if self.holder.memory_gib is None else f"{self.holder.memory_gib:.1f} GiB"

    @property
    def name(self) -> str:
        """Name of the program."""
        return show_line(self.holder.name or "a process")

    @property
    def line(self) -> str:
        """Name, id, memory and user as one line."""
        return show_line(self.holder.describe()) + (f" of {self.user}" if self.user else "")


class ProcessSource(Source):
    """Lists the processes on a GPU when its used memory has changed, at most every 5 s, since drivers are slow at it.
    Yields no readings."""

    name = "processes"

    def __init__(
        self,
        gpus: Sequence[SeenGpu],
        memory_used_gib: Callable[[int], float | None],
        add_line: Callable[[str], None],
        keep: Callable[[int, Sequence[GpuProcess]], None] = lambda gpu, processes: None,
    ) -> None:
        """
        Args:
            memory_used_gib: returns the latest reading of a GPU by its number.
            add_line: gets a line for each new process.
            keep: gets the number of a GPU and all of its processes.
        """
        self._gpus, self._memory_used_gib, self._add_line, self._keep = gpus, memory_used_gib, add_line, keep
        self._listed_at_gib: dict[int, float] = {}
        self._named: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """Lists the processes that were found at the start."""
        for gpu in self._gpus:
            if gpu.device.memory_used_bytes is not None:
                self._listed_at_gib[gpu.index] = gib(gpu.device.memory_used_bytes)
            self._list(gpu, gpu.device.holders)

    def read(self, *, slow: bool, edge: bool = False) -> list[Reading]:
        """Looks for new processes if due; returns no figures."""
        for gpu in self._gpus if slow else ():
            used_gib = self._memory_used_gib(gpu.index)
            if used_gib is None or abs(used_gib - self._listed_at_gib.get(gpu.index, 0.0)) < CHANGE_GIB:
                continue
            self._listed_at_gib[gpu.index] = used_gib
            with contextlib.suppress(NvmlError), NvmlSession() as nvml:
                self._list(gpu, list_holders(nvml, nvml.ask("nvmlDeviceGetHandleByUUID", gpu.device.uuid)))
        return []

    def _list(self, gpu: SeenGpu, holders: Sequence[Holder]) -> None:
        processes = [GpuProcess(holder, _user(holder)) for holder in holders]
        self._keep(gpu.index, processes)
        for process in processes:
            if (gpu.index, process.holder.pid) not in self._named:
                self._named.add((gpu.index, process.holder.pid))
                self._add_line(f"GPU {gpu.index} is used by {process.line}")


def _user(holder: Holder) -> str:
    """Returns the user of a process; empty if it can't be found, or if the id is another process's here."""
    with contextlib.suppress(psutil.Error, OSError, KeyError):
        process = psutil.Process(holder.pid)
        if holder.name is None or holder.name.endswith(process.name()):
            return show_line(process.username())
    return ""
