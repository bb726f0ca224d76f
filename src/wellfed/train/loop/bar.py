"""Shows the progress of training on the terminal: a bar, or a line of plain text a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.text import Text

from wellfed.units import show_duration, show_text

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress

REDRAW_S = 0.5
"""Seconds between two drawings of the bar, which take some milliseconds each."""
LINE_S = 60.0
"""Seconds between two lines if there is no terminal for a bar."""


class Bar:
    """Steps, time left, rate, latest metrics and live figures; without a terminal one line of plain text a minute."""

    def __init__(
        self,
        console: Console,
        rate: Callable[[], str],
        live: Callable[[], Sequence[Text]],
        *,
        total_steps: int | None,
        latest: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            rate: returns the present rate; empty if unknown.
            live: returns the figures of the device or the host, the most important first.
            clock: returns seconds; tests replace it.
        """
        self._console, self._rate, self._live, self._clock = console, rate, live, clock
        self._latest, self._total = latest, total_steps
        self._screen: Live | None = None
        self._progress: Progress
        self._look_at_s = self._began_s = 0.0
        self._first = 0
        self._line_at_s = math.inf  # no line before training

    def begin(self, step: int) -> None:
        """Opens the bar of a training that goes on after a step."""
        self._began_s, self._first = self._clock(), step
        self._line_at_s = self._began_s + LINE_S
        if not self._console.is_terminal or self._console.quiet:
            return
        from rich import progress
        from rich.live import Live

        columns: list[Any] = ["{task.description:<10}", progress.MofNCompleteColumn(), progress.TimeElapsedColumn()]
        if self._total is not None:
            columns.insert(1, progress.BarColumn(24))
            columns += ["ETA", progress.TimeRemainingColumn()]
        self._progress = progress.Progress(*columns, console=self._console, get_time=self._clock)
        self._progress.add_task("training", total=self._total, completed=step)
        self._screen = Live(console=self._console, auto_refresh=False, transient=True)
        self._screen.start()
        self._console.show_cursor(True)  # the shell keeps its cursor even if this process is killed

    def close(self) -> None:
        """Removes the bar."""
        screen, self._screen = self._screen, None
        if screen is not None:
            screen.stop()

    def look(self, what: str, step: int) -> None:
        """Draws the bar, or prints a line, if one is due. ``what``: training, or validating."""
        now_s = self._clock()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + REDRAW_S
        if self._screen is not None:
            self._progress.update(self._progress.task_ids[0], description=what, completed=step)
            lines = [_line(parts, self._console.width) for parts in (map(Text, self._figures()), self._live())]
            self._screen.update(Group(self._progress.get_renderable(), *lines), refresh=True)
        elif not (self._console.is_terminal or self._console.quiet) and now_s >= self._line_at_s:
            self._line_at_s = now_s + LINE_S
            shown = f"{what}: step {step:,}"
            if self._total is not None and step > self._first:
                left_s = (now_s - self._began_s) / (step - self._first) * max(0, self._total - step)
                shown += f" of {self._total:,}, {show_duration(left_s)} left"
            parts = [shown, *self._figures(), *(part.plain for part in self._live())]
            self._console.print(", ".join(parts), soft_wrap=True)

    def _figures(self) -> list[str]:
        """Returns the rate and the latest metrics of training and validation; losses first, since a line is cut."""
        names = [name for name in self._latest if not name.startswith("test/")]
        names.sort(key=lambda name: not name.endswith("/loss"))
        figures = [self._rate(), *(f"{name} {self._latest[name]:.4g}" for name in names[:4])]
        return [show_text(figure) for figure in figures if figure]


def _line(parts: Iterable[Text], width: int) -> Text:
    """Returns the parts two blanks apart, cut at the width of the terminal."""
    line = Text("  ", no_wrap=True, overflow="crop").join(parts)
    line.truncate(width)
    return line
