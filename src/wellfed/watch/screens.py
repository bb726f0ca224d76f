"""Shows the latest readings: a table in a terminal, otherwise one plain line a second."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wellfed.explain.diagnosis.curves.curve_verdict import utilisation_colour
from wellfed.explain.report.text_table import print_text
from wellfed.observe.machine_facts import GpuFacts
from wellfed.observe.telemetry.series import HOST
from wellfed.units import show_duration, show_line
from wellfed.watch.board import Board

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.,-~+*#"
"""Characters for 0 to 100 %."""
_CURVE = 30
"""Latest readings of utilisation that are shown as a curve."""
FIGURES = (
    ("util", "%", "util_pct"),
    ("SM", "%", "sm_active_pct"),
    ("memory", "GiB", "mem_used_gib"),
    ("power", "W", "power_w"),
    ("at", "C", "temp_c"),
)
"""Heading, unit and name of each figure, by importance. The last ones are cut in a narrow terminal."""


def _cells(gpu: GpuFacts, values: Mapping[str, float]) -> list[str]:
    """Returns a text for each figure, with the GPU's limit if it has one (``350/700``). Unknown figures are empty."""
    limits = {"mem_used_gib": gpu.memory_gib, "power_w": gpu.power_limit_w}
    texts = []
    for _, unit, name in FIGURES:
        known = [one for one in (values.get(name), limits.get(name)) if one is not None]
        digits = 1 if unit == "GiB" else 0
        texts.append("/".join(f"{one:.{digits}f}" for one in known) if name in values else "")
    return texts


def plain_line(board: Board, now_s: float) -> str:
    """Returns the figures as one line of text, without curves."""
    texts = []
    for gpu in board.gpus:
        cells = _cells(gpu, board.latest(gpu.index))
        figures = [f"{head} {text} {unit}" for (head, unit, _), text in zip(FIGURES, cells, strict=True) if text]
        text = board.trouble(gpu.index, now_s) or ", ".join(figures) or "no reading yet"
        texts.append(f"gpu{gpu.index} {text}")
    return "; ".join([*texts, f"host {_host_text(board)}"])


def table(board: Board, now_s: float, until: str, *, blocks: str = BLOCKS) -> Group:
    """Returns the table of the GPUs, the host and the processes.

    Args:
        until: text on when the monitor ends.
    """
    passed = f"{now_s:.0f} s" if now_s < 60 else show_duration(now_s)
    gpus = Table("GPU", box=None, padding=(0, 1, 0, 0))
    for head, unit, _ in FIGURES:
        gpus.add_column(f"{head} {unit}", justify="right", no_wrap=True)
    gpus.add_column("utilisation", no_wrap=True)
    processes = Table("GPU", "pid", "memory", "name", box=None, padding=(0, 1, 0, 0))
    for gpu in board.gpus:
        trouble = board.trouble(gpu.index, now_s)
        values = {} if trouble else board.latest(gpu.index)
        cells = [Text(text or "-") for text in _cells(gpu, values)]
        if "util_pct" in values:
            cells[0].stylize(utilisation_colour(values["util_pct"]))
        gpus.add_row(f"{gpu.index}", *cells, Text(trouble, "red") if trouble else _curve(board, gpu.index, blocks))
        for one in board.processes.get(gpu.index, ()):
            memory = "-" if one.memory_gib is None else f"{one.memory_gib:.1f} GiB"
            processes.add_row(f"{gpu.index}", f"{one.pid}", memory, show_line(one.name or "a process"))
    return Group(
        Text(f"{passed}{until}.", "dim"),
        *([gpus] if board.gpus else []),
        Text(f"host {_host_text(board)}"),
        *([processes] if processes.row_count else []),
    )


def _host_text(board: Board) -> str:
    """Returns CPU and memory of the host."""
    host = board.latest(HOST)
    cpu = f"{host['cpu_pct']:.0f} %" if "cpu_pct" in host else "-"
    memory = f"{host['mem_used_gib']:.1f}" if "mem_used_gib" in host else "-"
    return f"CPU {cpu} of {board.num_cores} cores, memory {memory}/{board.ram_gib:.1f} GiB"


def _curve(board: Board, gpu: int, blocks: str) -> Text:
    line = Text()
    for value in board.curve(gpu)[1][-_CURVE:]:
        level = min(len(blocks) - 1, max(0, round(value / 100 * (len(blocks) - 1))))
        line.append(blocks[level], utilisation_colour(value))
    return line


class Screen:
    """Prints permanent lines, and the latest figures: in a terminal a table below, else a plain line."""

    def __init__(self, console: Console, until: str, *, is_live: bool) -> None:
        """
        Args:
            until: text on when the monitor ends.
            is_live: whether a table is redrawn. It is not in the background of a shell.
        """
        self._console, self._until, self.is_live = console, until, is_live
        self._blocks = BLOCKS if console.encoding.startswith("utf") else ASCII_BLOCKS
        self._live: Live | None = None

    def print_line(self, text: str) -> None:
        """Prints a permanent line; a terminal gets it wrapped between words."""
        print_text(self._console, text)

    def show(self, board: Board, now_s: float) -> None:
        """Shows the current figures, in a table at the current width of the terminal."""
        if not self.is_live:
            self.print_line(f"{datetime.now():%H:%M:%S} {plain_line(board, now_s)}")
        elif _has_terminal(self._console):
            try:
                self._redraw(board, now_s)
            except OSError:  # the terminal is gone
                self._console.on_broken_pipe()

    def _redraw(self, board: Board, now_s: float) -> None:
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
        self._live.update(table(board, now_s, self._until, blocks=self._blocks), refresh=True)

    def close(self) -> None:
        """Removes the table."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def _has_terminal(console: Console) -> bool:
    """Returns whether this process is in the foreground."""
    try:
        return os.tcgetpgrp(console.file.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # Windows, or no terminal, as in a test
        return True
