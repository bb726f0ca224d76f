"""Shows the latest readings: a table with curves in a terminal, otherwise one plain line a second."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from wellfed.explain.diagnosis.curves.curve_verdict import STARVED_PCT, WELL_USED_PCT
from wellfed.monitor.board import Board
from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.telemetry.machines import HOST
from wellfed.units import show_duration

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.,-~+*#"
"""Characters for 0 to 100 %."""
CURVE_S = 60
_INDENT = 5


@dataclass(frozen=True)
class _Cell:
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


_SHOWN = (
    _Cell("util %", 7, "util", "%", _figure("util_pct")),
    _Cell("SM %", 6, "SM", "%", _figure("sm_active_pct")),
    _Cell("memory GiB", 13, "memory", "GiB", _figure("mem_used_gib", 1, lambda gpu: gpu.memory_gib)),
    _Cell("power W", 11, "power", "W", _figure("power_w", 0, lambda gpu: gpu.device.power_limit_w)),
    _Cell("SM/mem MHz", 12, "SM/mem", "MHz", _pair("sm_clock_mhz", "mem_clock_mhz")),
    _Cell("PCIe in/out MB/s", 18, "PCIe in/out", "MB/s", _pair("pcie_rx_mb_s", "pcie_tx_mb_s")),
    _Cell("temp C", 8, "at", "C", _figure("temp_c")),
)
"""Columns by importance. The last ones are left out in a narrow terminal."""


def table(board: Board, now_s: float, until: str, *, width: int, height: int, blocks: str = BLOCKS) -> list[Text]:
    """Returns the lines of the table, fitted to the terminal. Curves of the last minute are shown if there is space.

    Args:
        until: text on when the monitor ends.
    """
    shown = [one for index, one in enumerate(_SHOWN) if _INDENT + _width(index) <= width]
    head = "".join(one.head.rjust(one.width) for one in shown)
    passed = f"{now_s:.0f} s" if now_s < 60 else show_duration(now_s)
    lines = [Text(f"{passed}{until}. Curves: utilisation, the last minute.", "dim")]
    if board.gpus:
        lines.append(Text("GPU".ljust(_INDENT) + head, "bold"))
    num_gpus, num_free = len(board.gpus), height - len(lines) - 2
    has_curves = 2 * num_gpus <= num_free
    num_shown = num_gpus if has_curves or num_gpus <= num_free else max(0, num_free - 1)
    for gpu in board.gpus[:num_shown]:
        lines.append(_row(board, gpu, shown, now_s))
        if has_curves:
            lines.append(_curve(board, gpu.index, now_s, width, blocks))
    if num_shown < num_gpus:
        lines.append(Text(f"and {num_gpus - num_shown} more: a taller window shows them", "dim"))
    lines += [Text(f"host {_host_text(board)}"), _curve(board, HOST, now_s, width, blocks)]
    for line in lines:
        line.truncate(width)
    return lines


def plain_line(board: Board, now_s: float) -> str:
    """Returns the figures as one line of text, without curves."""
    texts = []
    for gpu in board.gpus:
        values = board.latest(gpu.index)
        figures = [f"{one.label} {text} {one.unit}" for one in _SHOWN if (text := one.show(gpu, values))]
        text = board.trouble(gpu.index, now_s) or ", ".join(figures) or "no reading yet"
        texts.append(f"gpu{gpu.index} {text}")
    return "; ".join([*texts, f"host {_host_text(board)}"])


def _row(board: Board, gpu: SeenGpu, shown: Sequence[_Cell], now_s: float) -> Text:
    number = f"{gpu.index}".rjust(3).ljust(_INDENT)
    if (trouble := board.trouble(gpu.index, now_s)) is not None:
        return Text(f"{number} {trouble}", "red")
    values, row = board.latest(gpu.index), Text(number)
    for one in shown:
        style = _style(values["util_pct"]) if one is _SHOWN[0] and "util_pct" in values else ""
        row.append((one.show(gpu, values) or "-").rjust(one.width), style)
    return row


def _curve(board: Board, gpu: int, now_s: float, width: int, blocks: str) -> Text:
    cell_s = max(1.0, board.interval_s)
    cells = board.cells(gpu, now_s, cell_s, max(1, min(int(CURVE_S / cell_s), width - _INDENT)))
    line = Text(" " * _INDENT)
    for style, run in groupby(cells, key=lambda value: "" if value is None or gpu == HOST else _style(value)):
        line.append("".join(" " if value is None else block(value, blocks) for value in run), style)
    return line


def _host_text(board: Board) -> str:
    host = board.latest(HOST)
    cpu = f"{host['cpu_pct']:.0f} %" if "cpu_pct" in host else "-"
    memory = f"{host['mem_used_gib']:.1f}" if "mem_used_gib" in host else "-"
    return f"CPU {cpu} of {board.num_cores} cores, memory {memory}/{board.ram_gib:.1f} GiB"


def block(value: float, blocks: str) -> str:
    """Returns the character whose height is nearest to this percentage."""
    return blocks[min(len(blocks) - 1, max(0, round(value / 100 * (len(blocks) - 1))))]


def _width(index: int) -> int:
    return sum(one.width for one in _SHOWN[: index + 1])


def _style(util_pct: float) -> str:
    return "green" if util_pct >= WELL_USED_PCT else "yellow" if util_pct >= STARVED_PCT else "red"


class PlainScreen:
    """Screen that prints one line a call, without control codes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def print_line(self, text: str) -> None:
        """Prints a permanent line, without wrapping."""
        self._console.print(text, soft_wrap=True)

    def show(self, board: Board, now_s: float) -> None:
        """Prints the current figures with the time of day."""
        self.print_line(f"{datetime.now():%H:%M:%S} {plain_line(board, now_s)}")

    def close(self) -> None:
        """Ends the display."""


class LiveScreen(PlainScreen):
    """Screen that redraws a table below the permanent lines. Draws nothing while the shell has the terminal (``&``,
    Ctrl-Z and ``bg``)."""

    def __init__(self, console: Console, until: str) -> None:
        """``until``: text on when the monitor ends."""
        super().__init__(console)
        self._until = until
        self._blocks = BLOCKS if console.encoding.startswith("utf") else ASCII_BLOCKS
        self._live: Live | None = None

    def show(self, board: Board, now_s: float) -> None:
        """Redraws the table at the current width of the terminal."""
        if not _has_terminal(self._console):
            self._leave()
            return
        size = self._console.size
        lines = table(board, now_s, self._until, width=size.width, height=size.height - 1, blocks=self._blocks)
        try:
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                    vertical_overflow="crop",
                )
                self._live.start()
                self._console.show_cursor(True)  # the shell keeps its cursor even if this process is killed
            self._live.update(Group(*lines), refresh=True)
        except OSError:  # the terminal is gone
            self._console.on_broken_pipe()

    def close(self) -> None:
        """Removes the table."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _leave(self) -> None:
        """Stops drawing. The next table appears below what others have written by then."""
        if self._live is not None:
            self._live = None
            self._console.pop_render_hook()
            self._console.clear_live()


def _has_terminal(console: Console) -> bool:
    """Returns whether this process is in the foreground."""
    try:
        return os.tcgetpgrp(console.file.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # Windows, or no terminal, as in a test
        return True
