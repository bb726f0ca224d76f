"""Finds the processes that hold memory of a GPU: id, memory, name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from wellfed.monitor.board import Board
from wellfed.observe.machine_facts import GpuFacts, Holder
from wellfed.observe.nvml.devices import list_holders
from wellfed.observe.nvml.session import NvmlError, NvmlSession
from wellfed.observe.telemetry.series import Reading, Source
from wellfed.units import show_line

CHANGE_GIB = 0.25
"""Change of used memory in GiB after which processes are listed again. Any CUDA process takes more."""


class ProcessSource(Source):
    """Lists the processes on a GPU when its used memory has changed, at most every 5 s, since drivers are slow at it.
    Yields no readings."""

    name = "processes"

    def __init__(self, board: Board, add_line: Callable[[str], None]) -> None:
        """
        Args:
            board: has the memory that is used, and gets the processes.
            add_line: gets a line for each new process.
        """
        self._board, self._add_line = board, add_line
        self._listed_at_gib: dict[int, float] = {}
        self._named: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """Lists the processes that were found at the start."""
        for gpu in self._board.gpus:
            self._listed_at_gib[gpu.index] = gpu.others_gib
            self._list(gpu, gpu.holders)

    def read(self, *, slow: bool, edge: bool = False) -> list[Reading]:
        """Looks for new processes if due; returns no figures."""
        for gpu in self._board.gpus if slow else ():
            used_gib = self._board.latest(gpu.index).get("mem_used_gib")
            if used_gib is None or abs(used_gib - self._listed_at_gib[gpu.index]) < CHANGE_GIB:
                continue
            self._listed_at_gib[gpu.index] = used_gib
            with contextlib.suppress(NvmlError), NvmlSession() as nvml:
                self._list(gpu, list_holders(nvml, nvml.ask("nvmlDeviceGetHandleByUUID", gpu.uuid)))
        return []

    def _list(self, gpu: GpuFacts, holders: Sequence[Holder]) -> None:
        self._board.processes[gpu.index] = holders
        for holder in holders:
            if (gpu.index, holder.pid) not in self._named:
                self._named.add((gpu.index, holder.pid))
                self._add_line(f"GPU {gpu.index} is used by {show_line(holder.describe())}")
