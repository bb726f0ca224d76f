"""Shows a monitor to people: a live table in a terminal, a line a second everywhere else."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live

from wellfed.monitor.live_table import ASCII_BLOCKS, BLOCKS, Face


class Screen(Protocol):
    """Where it is shown; used by one thread."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def show(self, face: Face, now_s: float) -> None:
        """The figures at the moment."""

    def close(self) -> None:
        """Only lines that stay follow."""


class PlainScreen:
    """One line a call, without control codes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Nothing breaks it into lines."""
        self._console.print(text, soft_wrap=True)

    def show(self, face: Face, now_s: float) -> None:
        """With the time of day."""
        self.say(f"{datetime.now():%H:%M:%S} {face.line(now_s)}")

    def close(self) -> None:
        """Nothing is left to take away."""


class LiveScreen:
    """A table that is drawn over again; lines that stay go above it. Nothing is drawn while the shell has the terminal
    (``&``, Ctrl-Z and ``bg``)."""

    def __init__(self, console: Console, until: str) -> None:
        """``until``: when the monitor ends."""
        self._console, self._until = console, until
        self._blocks = BLOCKS if console.encoding.startswith("utf") else ASCII_BLOCKS
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """Above the table."""
        self._console.print(text, soft_wrap=True)

    def show(self, face: Face, now_s: float) -> None:
        """The table anew, as wide as the terminal is now."""
        if not _has_terminal(self._console):
            self._leave()
            return
        size = self._console.size
        lines = face.table(now_s, self._until, width=size.width, height=size.height - 1, blocks=self._blocks)
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
        """The table goes."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _leave(self) -> None:
        """Write nothing, and draw the next table below what others have written by then."""
        if self._live is not None:
            self._live = None
            self._console.pop_render_hook()
            self._console.clear_live()


def _has_terminal(console: Console) -> bool:
    """Whether this process is in the foreground."""
    try:
        return os.tcgetpgrp(console.file.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # Windows; no terminal to ask, as in a test
        return True
