"""Lays out the monitor's table, so that it fills the window: figures, bars, curves, and the processes on each GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

from rich.cells import cell_len
from rich.text import Text

from wellfed.explain.diagnosis.curves.curve_verdict import utilisation_colour
from wellfed.explain.report.text_table import shortened
from wellfed.monitor.board import Board
from wellfed.monitor.gpu_cells import CELLS, GpuCell, host_text
from wellfed.monitor.processes import GpuProcess
from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.telemetry.machines import HOST
from wellfed.units import show_duration

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.,-~+*#"
"""Characters for 0 to 100 %."""
_INDENT = 5
_LEAST_BAR, _LEAST_WITH_PERCENT = 5, 10
"""Minimum characters of a bar, and of one with its percentage."""
_FULL_FRAC = 0.95
"""Share of a GPU's memory from which its bar is red."""
_FEW = 3
"""Processes that are shown before curves grow and bars appear."""


class _Layout:
    """Lines of a window for each part of the table, the most important parts first."""

    def __init__(self, board: Board, num_processes: int, height: int) -> None:
        num_gpus = len(board.gpus)
        self._left = height - 3 - bool(num_gpus)  # status, host and its curve; heads
        self.num_gpus = num_gpus if num_gpus <= self._left else max(0, self._left - 1)
        self._take(num_gpus if num_gpus <= self._left else self.num_gpus + 1)
        self.has_curves = self.num_gpus == num_gpus and self._take(num_gpus)
        self.num_processes = self._take_up_to(min(num_processes, _FEW), heads=1)
        self.has_bars = bool(num_gpus) and self.has_curves and self._take(num_gpus)
        self.num_processes += self._take_up_to(num_processes - self.num_processes) if self.num_processes else 0
        num_curves = 1 + (num_gpus if self.has_curves else 0)
        self.curve_height = 1 + max(0, self._left) // num_curves

    def _take(self, number: int) -> bool:
        fits = number <= self._left
        self._left -= number if fits else 0
        return fits

    def _take_up_to(self, number: int, heads: int = 0) -> int:
        taken = max(0, min(number, self._left - heads))
        self._left -= taken + heads if taken else 0
        return taken


def table(board: Board, now_s: float, until: str, *, width: int, height: int, blocks: str = BLOCKS) -> list[Text]:
    """Returns the lines of the table, fitted to the terminal.

    Args:
        until: text on when the monitor ends.
    """
    processes = [(gpu, process) for gpu in board.gpus for process in board.processes(gpu.index)]
    layout = _Layout(board, len(processes), height)
    ends = accumulate((one.width for one in CELLS), initial=_INDENT)
    shown = [one for one, start in zip(CELLS, ends, strict=False) if start + one.width <= width]
    passed = f"{now_s:.0f} s" if now_s < 60 else show_duration(now_s)
    span_s = _num_cells(width) * _cell_s(board)
    lines = [Text(f"{passed}{until}. Curves: utilisation, the last {show_duration(span_s)}.", "dim")]
    if board.gpus:
        lines.append(Text("GPU".ljust(_INDENT) + "".join(one.head.rjust(one.width) for one in shown), "bold"))
    for gpu in board.gpus[: layout.num_gpus]:
        lines.append(_row(board, gpu, shown, now_s))
        if layout.has_bars and board.trouble(gpu.index, now_s) is None:
            lines.append(_bars(board, gpu, width, blocks))
        if layout.has_curves:
            lines += _curve(board, gpu.index, now_s, width, layout.curve_height, blocks)
    if layout.num_gpus < len(board.gpus):
        lines.append(Text(f"and {len(board.gpus) - layout.num_gpus} more: a taller window shows them", "dim"))
    lines.append(Text(f"host {host_text(board)}"))
    lines += _curve(board, HOST, now_s, width, layout.curve_height, blocks)
    if layout.num_processes:
        lines += _process_lines(processes, layout.num_processes, width)
    for line in lines:
        line.truncate(width)
    return lines


def _row(board: Board, gpu: SeenGpu, shown: Sequence[GpuCell], now_s: float) -> Text:
    number = f"{gpu.index}".rjust(3).ljust(_INDENT)
    if (trouble := board.trouble(gpu.index, now_s)) is not None:
        return Text(f"{number} {trouble}", "red")
    values, row = board.latest(gpu.index), Text(number)
    for one in shown:
        style = utilisation_colour(values["util_pct"]) if one is CELLS[0] and "util_pct" in values else ""
        row.append((one.show(gpu, values) or "-").rjust(one.width), style)
    return row


def _bars(board: Board, gpu: SeenGpu, width: int, blocks: str) -> Text:
    """Returns bars of memory and power, each as a share of its limit; the second only if there is space."""
    values, line = board.latest(gpu.index), Text()
    figures = {"memory": ("mem_used_gib", gpu.memory_gib), "power": ("power_w", gpu.device.power_limit_w)}
    known = {label: values[name] / limit for label, (name, limit) in figures.items() if limit and name in values}
    half = (width - 2 * _INDENT) // 2
    is_half = len(known) > 1 and half - len("memory ") >= _LEAST_WITH_PERCENT
    full, empty = ("█", "░") if blocks == BLOCKS else ("#", "-")
    for label, frac in [*known.items()] if is_half else [*known.items()][:1]:
        percent = f" {100 * frac:3.0f} %"
        length = (half if is_half else width - _INDENT) - len(label) - 1
        if length - len(percent) >= _LEAST_BAR:
            length -= len(percent)
        else:
            percent = ""
        if length < _LEAST_BAR:
            continue
        filled = min(length, max(0, round(frac * length)))
        line.append(f"{'':{_INDENT}}{label} ").append(
            full * filled, "red" if label == "memory" and frac >= _FULL_FRAC else "cyan"
        )
        line.append(f"{empty * (length - filled)}{percent}")
    return line


def _curve(board: Board, gpu: int, now_s: float, width: int, height: int, blocks: str) -> list[Text]:
    """Returns the lines of a curve of the latest time, with a scale if it is high enough."""
    cells = board.cells(gpu, now_s, _cell_s(board), _num_cells(width))
    lines = []
    for below in range(height - 1, -1, -1):
        scale = "" if height < _FEW else "100" if below == height - 1 else "0" if below == 0 else ""
        line = Text(f"{scale:>{_INDENT - 1}} ")
        for style, run in groupby(
            cells, key=lambda value: "" if value is None or gpu == HOST else utilisation_colour(value)
        ):
            line.append("".join(" " if value is None else block(value, blocks, below, height) for value in run), style)
        line.rstrip()
        lines.append(line)
    return lines


def block(value: float, blocks: str, below: int = 0, height: int = 1) -> str:
    """Returns the character of a percentage in one line of a curve.

    Args:
        below: lines of the curve below this one.
        height: lines of the curve.
    """
    level = min(height * len(blocks) - 1, max(0, round(value / 100 * (height * len(blocks) - 1)))) - below * len(blocks)
    return " " if level < 0 else blocks[min(level, len(blocks) - 1)]


def _num_cells(width: int) -> int:
    return max(1, width - _INDENT)


def _cell_s(board: Board) -> float:
    return max(1.0, board.interval_s)


def _process_lines(processes: Sequence[tuple[SeenGpu, GpuProcess]], number: int, width: int) -> list[Text]:
    """Returns the processes: GPU, id, memory, rank and command, one line each."""
    of = "" if number == len(processes) else f", {number} of {len(processes)}"
    rows = [("GPU", "pid", "memory", [f"process{of}"])]
    rows += [(str(gpu.index), str(one.holder.pid), one.memory_text, one.words) for gpu, one in processes[:number]]
    widths = [max(cell_len(row[place]) for row in rows) for place in (1, 2)]  # type: ignore[arg-type]
    lines = []
    for style, (index, pid, memory, words) in zip(["bold", *[""] * number], rows, strict=True):
        start = f"{index:>3}  {pid:>{widths[0]}}  {memory:>{widths[1]}}  "
        lines.append(Text(start + shortened(words, width - len(start)), style))
    return lines
