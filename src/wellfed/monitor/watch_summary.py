"""Sums up each GPU at the end of a watch: mean and peak, a verdict, and the command to run next."""

from __future__ import annotations

from collections.abc import Mapping

from wellfed.command_line import command
from wellfed.explain.diagnosis.curves.level import verdict_of
from wellfed.monitor.board import Board
from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.units import show_duration, show_energy

_Figures = Mapping[str, Mapping[str, float]]


def summary_lines(board: Board, now_s: float, problem: str | None) -> list[str]:
    """Returns the lines to print at the end, ``now_s`` seconds after the start; ``problem``: why there are no GPUs."""
    figures = board.gpu_figures(now_s)
    lines, advised = [f"Watched for {show_duration(now_s)}."], dict[str, list[str]]()
    for gpu in board.gpus:
        of_gpu = figures.get(str(gpu.index), {})
        (verdict, *more), advice = _verdict(board, gpu)
        trouble = board.trouble(gpu.index, now_s)
        lines.append(f"{gpu.title}: {verdict}{f' (at the end {trouble})' if trouble else ''}.")
        lines += [f"  {line}" for line in [*more, *_gpu_lines(gpu, of_gpu)]]
        if advice:
            advised.setdefault(advice, []).append(f"GPU {gpu.index}")
    if any(gpu.is_simulated for gpu in board.gpus):
        lines.append("A simulated GPU's figures of speed, memory and power are of no real card.")
    if problem is not None:
        lines.append(f"How busy a GPU was is not known (NVML: {problem}).")
        advised[f"What is missing: {command('doctor')}"] = []
    lines.append("Host:")
    lines += [f"  {line}" for line in _host_lines(board)] or ["  nothing was read"]
    return lines + [f"{', '.join(of)}: {advice}" if len(board.gpus) > 1 else advice for advice, of in advised.items()]


def _verdict(board: Board, gpu: SeenGpu) -> tuple[list[str], str | None]:
    """Returns a line or two, and the command to run next; None if there is none."""
    if not gpu.has_utilisation:
        where = "an instance" if gpu.device.is_mig else "a split card"
        return [f"NVML gives no utilisation of {where}"], None
    found = verdict_of(*board.curve(gpu.index))
    return [found.message, *filter(None, [found.in_use_message])], found.advice


def _gpu_lines(gpu: SeenGpu, figures: _Figures) -> list[str]:
    lines = []
    for name, what in (("util_pct", "utilisation"), ("sm_active_pct", "SM active")):
        if name in figures:
            # Not rounded, as in the verdict: 49.9 is below 50.
            lines.append(f"{what}: mean {int(figures[name]['mean'])} %, peak {figures[name]['max']:.0f} %")
    if memory := figures.get("mem_used_gib"):
        of = "" if gpu.memory_gib is None else f" of {gpu.memory_gib:.1f} GiB"
        lines.append(f"memory: mean {memory['mean']:.1f} GiB, peak {memory['max']:.1f}{of or ' GiB'}")
    if power := figures.get("power_w"):
        of = "" if gpu.device.power_limit_w is None else f" of {gpu.device.power_limit_w:.0f}"
        energy = f"; {show_energy(float(figures['energy_j']))}" if "energy_j" in figures else ""  # type: ignore[arg-type]
        lines.append(f"power: mean {power['mean']:.0f} W, peak {power['max']:.0f}{of} W{energy}")
    return lines


def _host_lines(board: Board) -> list[str]:
    lines, host = [], board.host_figures()
    if cpu := host.get("cpu_pct"):
        lines.append(f"CPU: mean {cpu['mean']:.0f} %, peak {cpu['max']:.0f} % of {board.num_cores} cores")
    if memory := host.get("mem_used_gib"):
        lines.append(f"memory: mean {memory['mean']:.1f} GiB, peak {memory['max']:.1f} of {board.ram_gib:.1f} GiB")
    return lines
