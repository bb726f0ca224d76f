"""Shows the latest readings: a table with curves in a terminal, otherwise one plain line a second."""

from __future__ import annotations

import os
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live

from wellfed.explain.report.text_table import print_text
from wellfed.monitor.board import Board
from wellfed.monitor.gpu_cells import plain_line
from wellfed.monitor.live_table import ASCII_BLOCKS, BLOCKS, table


class PlainScreen:
    """Screen that prints one line a call, without control codes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def print_line(self, text: str) -> None:
        """Prints a permanent line; a terminal gets it wrapped between words."""
        print_text(self._console, text)

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
