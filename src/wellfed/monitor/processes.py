"""Names the processes that hold memory of a GPU, each once, with its rank if it has one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.nvml.devices import Holder, list_holders
from wellfed.observe.nvml.session import NvmlError, NvmlSession
from wellfed.observe.telemetry.series import Reading, Source
from wellfed.units import gib, show_line

CHANGE_GIB = 0.25
"""Change of used memory in GiB after which processes are listed again. Any CUDA process takes more."""
_RANKS = {
    "RANK": "rank",
    "OMPI_COMM_WORLD_RANK": "rank",
    "SLURM_PROCID": "rank",
    "LOCAL_RANK": "local rank",
}
"""Variables in which launchers store a process's rank, and the label of that rank."""


class ProcessSource(Source):
    """Lists the processes on a GPU when its used memory has changed, at most every 5 s, since drivers are slow at it.
    Yields no readings."""

    name = "processes"

    def __init__(
        self,
        gpus: Sequence[SeenGpu],
        memory_used_gib: Callable[[int], float | None],
        add_line: Callable[[str], None],
        *,
        environ_of: Callable[[Holder], Mapping[str, str]] | None = None,
    ) -> None:
        """
        Args:
            memory_used_gib: returns the latest reading of a GPU by its number.
            add_line: gets a line for each GPU that has new processes.
            environ_of: returns the environment of a process, empty if not readable; None = ask the system.
        """
        self._gpus, self._memory_used_gib, self._add_line = gpus, memory_used_gib, add_line
        self._environ_of = environ_of or _environ_of
        self._listed_at_gib: dict[int, float] = {}
        self._named: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """Names the processes that were found at the start."""
        for gpu in self._gpus:
            if gpu.device.memory_used_bytes is not None:
                self._listed_at_gib[gpu.index] = gib(gpu.device.memory_used_bytes)
            self._name(gpu, gpu.device.holders)

    def read(self, *, slow: bool, edge: bool = False) -> list[Reading]:
        """Looks for new processes if due; returns no figures."""
        for gpu in self._gpus if slow else ():
            used_gib = self._memory_used_gib(gpu.index)
            if used_gib is None or abs(used_gib - self._listed_at_gib.get(gpu.index, 0.0)) < CHANGE_GIB:
                continue
            self._listed_at_gib[gpu.index] = used_gib
            with contextlib.suppress(NvmlError), NvmlSession() as nvml:
                self._name(gpu, list_holders(nvml, nvml.ask("nvmlDeviceGetHandleByUUID", gpu.device.uuid)))
        return []

    def _name(self, gpu: SeenGpu, holders: Sequence[Holder]) -> None:
        new = [holder for holder in holders if (gpu.index, holder.pid) not in self._named]
        self._named |= {(gpu.index, holder.pid) for holder in new}
        if new:
            self._add_line(f"GPU {gpu.index} is used by {', '.join(self._describe(holder) for holder in new)}")

    def _describe(self, holder: Holder) -> str:
        rank = rank_in(self._environ_of(holder))
        return show_line(holder.describe()) + (f" {rank}" if rank else "")


def rank_in(environ: Mapping[str, str]) -> str | None:
    """Returns the rank that a launcher wrote into the environment of a process: ``rank 3``."""
    return next(
        (f"{label} {environ[name]}" for name, label in _RANKS.items() if environ.get(name, "").isdecimal()), None
    )


def _environ_of(holder: Holder) -> Mapping[str, str]:
    # Inside a container the id may belong to another process, whose name then differs.
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(holder.pid)
        if holder.name is None or holder.name in (process.name(), Path(process.exe()).name):
            return process.environ()
    return {}
