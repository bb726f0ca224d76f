"""Shows the progress of training on the terminal: a bar, or a line of plain text a minute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    ) -> None:
        """
        Args:
            rate: returns the present rate; empty if unknown.
            live: returns the figures of the device or the host, the most important first.
        """
        self._console, self._rate, self._live, self._clock = console, rate, live, console.get_time
        self._latest, self._total = latest, total_steps
        self._screen: Live | None = None
        self._progress: Progress
        self._began_s = self._every_s = 0.0
        self._first = 0
        self._due_s = math.inf  # nothing is shown before training

    def begin(self, step: int) -> None:
        """Opens the bar of a training that goes on after a step."""
        self._began_s, self._first = self._clock(), step
        if self._console.quiet:
            return
        if not self._console.is_terminal:
            self._every_s, self._due_s = LINE_S, self._began_s + LINE_S
            return
        from rich import progress
        from rich.live import Live

        columns: list[Any] = ["{task.description:<10}", progress.MofNCompleteColumn(), progress.TimeElapsedColumn()]
        if self._total is not None:
            columns.insert(1, progress.BarColumn(24))
            columns += ["ETA", progress.TimeRemainingColumn()]
        self._progress = progress.Progress(*columns, console=self._console)
        self._progress.add_task("training", total=self._total, completed=step)
        self._screen = Live(console=self._console, auto_refresh=False, transient=True)
        self._screen.start()
        self._every_s, self._due_s = REDRAW_S, 0.0
        self._console.show_cursor(True)  # the shell keeps its cursor even if this process is killed

    def close(self) -> None:
        """Removes the bar."""
        screen, self._screen, self._due_s = self._screen, None, math.inf
        if screen is not None:
            screen.stop()

    def look(self, what: str, step: int) -> None:
        """Draws the bar, or prints a line, if one is due. ``what``: training, or validating."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + self._every_s
        figures, live = list(map(Text, self._figures())), self._live()
        if self._screen is not None:
            self._progress.update(self._progress.task_ids[0], description=what, completed=step)
            lines = [Text("  ", no_wrap=True, overflow="crop").join(parts) for parts in (figures, live)]
            for line in lines:
                line.truncate(self._console.width)
            self._screen.update(Group(self._progress.get_renderable(), *lines), refresh=True)
        else:
            self._print(what, step, now_s, [part.plain for part in (*figures, *live)])

    def _print(self, what: str, step: int, now_s: float, figures: list[str]) -> None:
        shown = f"{what}: step {step:,}"
        if self._total is not None and step > self._first:
            left_s = (now_s - self._began_s) / (step - self._first) * max(0, self._total - step)
            shown += f" of {self._total:,}, {show_duration(left_s)} left"
        self._console.print(", ".join([shown, *figures]), soft_wrap=True)

    def _figures(self) -> list[str]:
        """Returns the rate and the latest metrics of training and validation; losses first, since a line is cut."""
        names = [name for name in self._latest if not name.startswith("test/")]
        names.sort(key=lambda name: not name.endswith("/loss"))
        figures = [self._rate(), *(f"{name} {self._latest[name]:.4g}" for name in names[:4])]
        return [show_text(figure) for figure in figures if figure]
