"""Watches all GPUs and the host beside other programs, and stores the readings."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

import psutil

from wellfed.command_line import command
from wellfed.explain.diagnosis.curves.curve_verdict import verdict_of
from wellfed.observe.machine_facts import GpuFacts, Holder
from wellfed.observe.nvml.devices import list_holders
from wellfed.observe.nvml.session import NvmlError, NvmlSession
from wellfed.observe.telemetry.host import WholeHostSource
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.telemetry.sampler import Sampler
from wellfed.observe.telemetry.series import HOST, Reading, Sample, Source
from wellfed.record.entries import EventKind
from wellfed.units import gib, show_duration, show_energy, show_line
from wellfed.watch.board import Board
from wellfed.watch.seen_gpus import FoundGpus

_Figures = Mapping[str, Mapping[str, float]]


class Monitor(ExitStack):
    """Reads during the ``with`` block, in its own threads, so that a hanging driver delays only its own figures.

    Call `new_lines` and `summary` from one thread only.
    """

    def __init__(self, found: FoundGpus, *, interval_s: float) -> None:
        super().__init__()
        self._found, self._began_at_s = found, time.monotonic()
        self._new_lines: deque[str] = deque()
        self._receivers: list[Callable[[Sequence[Sample]], None]] = []
        progress = Progress(time_s=self.time_s)
        progress.enter("train")  # phase that a summary covers
        self.board = Board(
            found.gpus,
            num_cores=psutil.cpu_count() or 1,
            ram_gib=gib(psutil.virtual_memory().total),
            interval_s=interval_s,
        )
        self._named: set[tuple[int, int]] = set()
        """GPU and id of the processes that were shown."""
        self._sampler = Sampler(self._take, self._event, interval_s=interval_s, progress=progress, time_s=self.time_s)
        self._sampler.watch(found.gpus, host=WholeHostSource())
        self._sampler.add(_Processes(found.gpus, self._list))

    def __enter__(self) -> Self:
        for gpu in self._found.gpus:
            size = "" if gpu.memory_gib is None else f", {gpu.memory_gib:.1f} GiB"
            self.add_line(f"{gpu.title}{size}")
        for note in self._found.notes:
            self.add_line(f"NVML: {note}")
        for gpu in self._found.gpus:
            self._list(gpu, gpu.holders)
        self.enter_context(self._sampler)
        return self

    def time_s(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self._began_at_s

    def add_receiver(self, receive: Callable[[Sequence[Sample]], None]) -> None:
        """Adds a receiver of the readings. Call it before the block."""
        self._receivers.append(receive)

    def add_line(self, text: str) -> None:
        """Adds a line to be shown once. Safe from any thread."""
        self._new_lines.append(show_line(text))

    def new_lines(self) -> list[str]:
        """Returns the lines that were not shown yet."""
        return [self._new_lines.popleft() for _ in range(len(self._new_lines))]

    def summary(self) -> list[str]:
        """Returns the summary of each GPU since the start."""
        return summary_lines(self.board, self.time_s(), self._found.problem)

    def _take(self, samples: Sequence[Sample]) -> None:
        self.board.add(samples)
        for receive in self._receivers:
            receive(samples)

    def _list(self, gpu: GpuFacts, holders: Sequence[Holder]) -> None:
        """Takes the processes on a GPU, and adds a line for each new one."""
        self.board.processes[gpu.index] = holders
        for holder in holders:
            if (gpu.index, holder.pid) not in self._named:
                self._named.add((gpu.index, holder.pid))
                self.add_line(f"GPU {gpu.index} is used by {holder.describe()}")

    def _event(self, kind: EventKind, **facts: Any) -> None:
        gpu = facts.get("gpu")
        if kind == "gpu_lost":
            self.add_line(f"GPU {gpu} is lost: {facts['message']}")
        elif kind == "metric_absent":
            self.add_line(f"GPU {gpu} does not offer {', '.join(facts['metrics'])} ({facts['reason']}).")
        else:
            self.add_line(("" if gpu is None else f"GPU {gpu}: ") + str(facts["message"]))


class _Processes(Source):
    """Lists the processes on each GPU every 5 s, since drivers are slow at it. Yields no readings."""

    name = "processes"

    def __init__(self, gpus: Sequence[GpuFacts], take: Callable[[GpuFacts, Sequence[Holder]], None]) -> None:
        self._gpus, self._take = gpus, take

    def read(self, *, slow: bool, edge: bool = False) -> list[Reading]:
        """Lists processes if due; returns no figures."""
        for gpu in self._gpus if slow else ():
            with suppress(NvmlError), NvmlSession() as nvml:
                self._take(gpu, list_holders(nvml, nvml.ask("nvmlDeviceGetHandleByUUID", gpu.uuid)))
        return []


def summary_lines(board: Board, now_s: float, problem: str | None) -> list[str]:
    """Returns the lines to print at the end, ``now_s`` seconds after the start; ``problem``: why there are no GPUs."""
    lines, advised = [f"Watched for {show_duration(now_s)}."], dict[str, list[str]]()
    for gpu in board.gpus:
        (verdict, *more), advice = _verdict(board, gpu)
        trouble = board.trouble(gpu.index, now_s)
        lines.append(f"{gpu.title}: {verdict}{f' (at the end {trouble})' if trouble else ''}.")
        lines += [f"  {line}" for line in [*more, *_gpu_lines(gpu, board.figures(gpu.index))]]
        if advice:
            advised.setdefault(advice, []).append(f"GPU {gpu.index}")
    if any(gpu.is_simulated for gpu in board.gpus):
        lines.append("A simulated GPU's figures of speed, memory and power are of no real card.")
    if problem is not None:
        lines.append(f"GPU utilisation is unknown (NVML: {problem}).")
        advised[f"What is missing: {command('doctor')}"] = []
    lines.append("Host:")
    lines += [f"  {line}" for line in _host_lines(board)] or ["  nothing was read"]
    return lines + [f"{', '.join(of)}: {advice}" if len(board.gpus) > 1 else advice for advice, of in advised.items()]


def _verdict(board: Board, gpu: GpuFacts) -> tuple[list[str], str | None]:
    """Returns one or two lines, and the command to run next; None if there is none."""
    if not gpu.has_utilisation:
        where = "an instance" if gpu.is_mig else "a split card"
        return [f"NVML gives no utilisation of {where}"], None
    return verdict_of(*board.curve(gpu.index))


def _gpu_lines(gpu: GpuFacts, figures: _Figures) -> list[str]:
    lines = []
    for name, what in (("util_pct", "utilisation"), ("sm_active_pct", "SM active")):
        if name in figures:
            # Truncated, not rounded, like the verdict: 49.9 is below 50.
            lines.append(f"{what}: mean {int(figures[name]['mean'])} %, peak {figures[name]['max']:.0f} %")
    if memory := figures.get("mem_used_gib"):
        of = "" if gpu.memory_gib is None else f" of {gpu.memory_gib:.1f} GiB"
        lines.append(f"memory: mean {memory['mean']:.1f} GiB, peak {memory['max']:.1f}{of or ' GiB'}")
    if power := figures.get("power_w"):
        of = "" if gpu.power_limit_w is None else f" of {gpu.power_limit_w:.0f}"
        energy = f"; {show_energy(float(figures['energy_j']))}" if "energy_j" in figures else ""  # type: ignore[arg-type]
        lines.append(f"power: mean {power['mean']:.0f} W, peak {power['max']:.0f}{of} W{energy}")
    return lines


def _host_lines(board: Board) -> list[str]:
    lines, host = [], board.figures(HOST)
    if cpu := host.get("cpu_pct"):
        lines.append(f"CPU: mean {cpu['mean']:.0f} %, peak {cpu['max']:.0f} % of {board.num_cores} cores")
    if memory := host.get("mem_used_gib"):
        lines.append(f"memory: mean {memory['mean']:.1f} GiB, peak {memory['max']:.1f} of {board.ram_gib:.1f} GiB")
    return lines
