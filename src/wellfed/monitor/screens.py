"""Shows the monitor: a live table in a terminal, a line a second everywhere else."""

from __future__ import annotations

import os
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live

from wellfed.monitor.board import Board
from wellfed.monitor.live_table import ASCII_BLOCKS, BLOCKS, plain_line, table


class PlainScreen:
    """Prints one line a call, without control codes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Prints a line that stays, and does not wrap it."""
        self._console.print(text, soft_wrap=True)

    def show(self, board: Board, now_s: float) -> None:
        """Prints the current figures with the time of day."""
        self.say(f"{datetime.now():%H:%M:%S} {plain_line(board, now_s)}")

    def close(self) -> None:
        """Ends the display; only lines that stay follow."""


class LiveScreen(PlainScreen):
    """Redraws a table, with the lines that stay above it.

    Nothing is drawn while the shell has the terminal (``&``, Ctrl-Z and ``bg``).
    """

    def __init__(self, console: Console, until: str) -> None:
        """``until``: when the monitor ends."""
        super().__init__(console)
        self._until = until
        self._blocks = BLOCKS if console.encoding.startswith("utf") else ASCII_BLOCKS
        self._live: Live | None = None

    def show(self, board: Board, now_s: float) -> None:
        """Redraws the table, as wide as the terminal is now."""
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
                self._console.show_cursor(True)  # whatever ends this process, the shell keeps its cursor
            self._live.update(Group(*lines), refresh=True)
        except OSError:  # the terminal is gone
            self._console.on_broken_pipe()

    def close(self) -> None:
        """Removes the table."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _leave(self) -> None:
        """Stops drawing; the next table comes below what others have written by then."""
        if self._live is not None:
            self._live = None
            self._console.pop_render_hook()
            self._console.clear_live()


def _has_terminal(console: Console) -> bool:
    """Returns whether this process is in the foreground."""
    try:
        return os.tcgetpgrp(console.file.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # Windows; no terminal to ask, as in a test
        return True
