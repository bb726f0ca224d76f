"""Formats the figures of each GPU and of the host: cells of the monitor's table, and one plain line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from wellfed.monitor.board import Board
from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.telemetry.machines import HOST


@dataclass(frozen=True)
class GpuCell:
    """One figure of a GPU, or a pair of them."""

    head: str
    width: int
    label: str
    """Label in a plain line, where the unit follows the figure."""
    unit: str
    show: Callable[[SeenGpu, Mapping[str, float]], str]
    """Returns an empty text if the figure is unknown."""


def _figure(
    name: str, digits: int = 0, limit: Callable[[SeenGpu], float | None] = lambda gpu: None
) -> Callable[[SeenGpu, Mapping[str, float]], str]:
    """Returns a function that shows a figure, with the GPU's limit if it has one: ``350/700``."""

    def show(gpu: SeenGpu, values: Mapping[str, float]) -> str:
        known = [one for one in (values.get(name), limit(gpu)) if one is not None]
        return "/".join(f"{one:.{digits}f}" for one in known) if name in values else ""

    return show


def _pair(one: str, other: str) -> Callable[[SeenGpu, Mapping[str, float]], str]:
    def show(gpu: SeenGpu, values: Mapping[str, float]) -> str:
        texts = [_figure(name)(gpu, values) for name in (one, other)]
        return "/".join(text or "-" for text in texts) if any(texts) else ""

    return show


CELLS = (
    GpuCell("util %", 7, "util", "%", _figure("util_pct")),
    GpuCell("SM %", 6, "SM", "%", _figure("sm_active_pct")),
    GpuCell("memory GiB", 13, "memory", "GiB", _figure("mem_used_gib", 1, lambda gpu: gpu.memory_gib)),
    GpuCell("power W", 11, "power", "W", _figure("power_w", 0, lambda gpu: gpu.device.power_limit_w)),
    GpuCell("SM/mem MHz", 12, "SM/mem", "MHz", _pair("sm_clock_mhz", "mem_clock_mhz")),
    GpuCell("PCIe in/out MB/s", 18, "PCIe in/out", "MB/s", _pair("pcie_rx_mb_s", "pcie_tx_mb_s")),
    GpuCell("temp C", 8, "at", "C", _figure("temp_c")),
)
"""Cells by importance. The last ones are left out in a narrow terminal."""


def plain_line(board: Board, now_s: float) -> str:
    """Returns the figures as one line of text, without curves."""
    texts = []
    for gpu in board.gpus:
        values = board.latest(gpu.index)
        figures = [f"{one.label} {text} {one.unit}" for one in CELLS if (text := one.show(gpu, values))]
        text = board.trouble(gpu.index, now_s) or ", ".join(figures) or "no reading yet"
        texts.append(f"gpu{gpu.index} {text}")
    return "; ".join([*texts, f"host {host_text(board)}"])


def host_text(board: Board) -> str:
    """Returns CPU and memory of the host."""
    host = board.latest(HOST)
    cpu = f"{host['cpu_pct']:.0f} %" if "cpu_pct" in host else "-"
    memory = f"{host['mem_used_gib']:.1f}" if "mem_used_gib" in host else "-"
    return f"CPU {cpu} of {board.num_cores} cores, memory {memory}/{board.ram_gib:.1f} GiB"
