"""Finds the processes that hold memory of a GPU, with their commands, and their ranks if they have one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from wellfed.explain.report.text_table import shortened
from wellfed.masking import masked_command
from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.nvml.devices import Holder, list_holders
from wellfed.observe.nvml.session import NvmlError, NvmlSession
from wellfed.observe.telemetry.series import Reading, Source
from wellfed.units import gib, show_line

CHANGE_GIB = 0.25
"""Change of used memory in GiB after which processes are listed again. Any CUDA process takes more."""
_COMMAND_WIDTH = 80
"""Maximum characters of a command in a line of its own."""
_RANKS = {
    "RANK": "rank",
    "OMPI_COMM_WORLD_RANK": "rank",
    "SLURM_PROCID": "rank",
    "LOCAL_RANK": "local rank",
}
"""Variables in which launchers store a process's rank, and the label of that rank."""


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU."""

    holder: Holder
    rank: str | None
    command: tuple[str, ...]
    """Name and arguments, with secrets masked; empty if not readable."""

    @property
    def memory_text(self) -> str:
        """Memory as a cell."""
        return "-" if self.holder.memory_gib is None else f"{self.holder.memory_gib:.1f} GiB"

    @property
    def words(self) -> list[str]:
        """Rank and command, or name."""
        command = self.command or (show_line(self.holder.name or "a process"),)
        return [*([f"{self.rank}:"] if self.rank else []), *command]

    @property
    def line(self) -> str:
        """Name, id, memory, rank and command as one line."""
        command = shortened(self.command, _COMMAND_WIDTH)
        return f"{show_line(self.holder.describe())}{f' {self.rank}' if self.rank else ''}{command and f': {command}'}"


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
        *,
        ask: Callable[[Holder], tuple[Mapping[str, str], Sequence[str]]] | None = None,
    ) -> None:
        """
        Args:
            memory_used_gib: returns the latest reading of a GPU by its number.
            add_line: gets a line for each new process.
            keep: gets the number of a GPU and all of its processes.
            ask: returns environment and arguments of a process, empty if not readable; None = ask the system.
        """
        self._gpus, self._memory_used_gib, self._add_line, self._keep = gpus, memory_used_gib, add_line, keep
        self._ask = ask or _ask_system
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
        processes = [self._process_of(holder) for holder in holders]
        self._keep(gpu.index, processes)
        for process in processes:
            if (gpu.index, process.holder.pid) not in self._named:
                self._named.add((gpu.index, process.holder.pid))
                self._add_line(f"GPU {gpu.index} is used by {process.line}")

    def _process_of(self, holder: Holder) -> GpuProcess:
        environ, arguments = self._ask(holder)
        first, *others = arguments or [""]
        name = first if " " in first else Path(first).name  # a title that a program gave itself may have spaces
        words = tuple(map(show_line, masked_command([name, *filter(None, others)]))) if name else ()
        return GpuProcess(holder, rank_in(environ), words)


def rank_in(environ: Mapping[str, str]) -> str | None:
    """Returns the rank that a launcher wrote into the environment of a process: ``rank 3``."""
    return next(
        (f"{label} {environ[name]}" for name, label in _RANKS.items() if environ.get(name, "").isdecimal()), None
    )


def _ask_system(holder: Holder) -> tuple[Mapping[str, str], Sequence[str]]:
    """Returns environment and arguments of a process; both empty if it can't be found."""
    environ: Mapping[str, str] = {}
    # Inside a container the id may belong to another process, whose name then differs.
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(holder.pid)
        if holder.name is None or holder.name == process.name() or holder.name == Path(process.exe()).name:
            arguments = process.cmdline()
            with contextlib.suppress(psutil.Error, OSError):  # another user's, whose command can be read
                environ = process.environ()
            return environ, arguments
    return {}, []
