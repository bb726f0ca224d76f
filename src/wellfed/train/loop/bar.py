"""Shows the progress of training on the terminal: a bar, or a line of plain text a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import rich.live
from rich.console import Console, Group
from rich.text import Text

from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.units import show_duration, show_text

REDRAW_S = 0.5
"""Seconds between two drawings of the bar, which take some milliseconds each."""
LINE_S = 60.0
"""Seconds between two lines if there is no terminal for a bar."""
_BAR_WIDTH = 24
"""Columns of the bar; a terminal of 80 columns then has space for seven digits of steps, and for hours."""
_LEAST_BAR = 5
"""Columns of the shortest bar that is drawn."""
_PHASE = 11
"""Columns of the phase before the bar."""


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
        self._screen: rich.live.Live | None = None
        self._look_at_s = self._began_s = 0.0
        self._line_at_s = math.inf  # no line before training
        self._warm_step = 0
        """Last step of the warm-up, which compiles and loads kernels."""
        self._warm_s = 0.0
        """End of the warm-up. The time left is that of all later steps and validations."""

    def begin(self, step: int) -> None:
        """Opens the bar of a training that goes on after a step."""
        self._began_s = self._warm_s = self._clock()
        self._line_at_s = self._began_s + LINE_S
        self._warm_step = step + WARMUP_STEPS
        if self._console.is_terminal and not self._console.quiet:
            self._screen = rich.live.Live(console=self._console, auto_refresh=False, transient=True)
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
        width = self._console.width
        self._look_at_s = now_s + REDRAW_S
        if step <= self._warm_step:
            self._warm_s = now_s
        if self._screen is not None:
            figures = _line([Text(one) for one in self._figures()], width)
            self._screen.update(Group(self._bar(what, step, now_s), figures, _line(self._live(), width)), refresh=True)
        elif not (self._console.is_terminal or self._console.quiet) and now_s >= self._line_at_s:
            self._line_at_s = now_s + LINE_S
            left_s = self._left_s(step, now_s)
            left = [] if left_s is None else [f"{show_duration(left_s)} left"]
            total = "" if self._total is None else f" of {self._total:,}"
            parts = [f"{what}: step {step:,}{total}", *left, *self._figures(), *(part.plain for part in self._live())]
            self._console.print(", ".join(parts), soft_wrap=True)

    def _figures(self) -> list[str]:
        """Returns the rate and the latest metrics of training and validation; losses first, since a line is cut."""
        names = [name for name in self._latest if not name.startswith("test/")]
        names.sort(key=lambda name: not name.endswith("/loss"))
        figures = [self._rate(), *(f"{name} {self._latest[name]:.4g}" for name in names[:4])]
        return [show_text(figure) for figure in figures if figure]

    def _left_s(self, step: int, now_s: float) -> float | None:
        """Returns the seconds left at the rate since the warm-up; None if unknown."""
        if self._total is None or step <= self._warm_step:
            return None
        return (now_s - self._warm_s) / (step - self._warm_step) * max(0, self._total - step)

    def _bar(self, what: str, step: int, now_s: float) -> Text:
        """Returns phase, bar, count, time and time left; a narrow terminal drops the bar, then the phase."""
        spent, left_s = timedelta(seconds=int(now_s - self._began_s)), self._left_s(step, now_s)
        if self._total is None:
            return _line([Text(what, "bold"), Text(f"step {step} {spent}")], self._console.width)
        figures = f"{step}/{self._total} {spent} ETA {'-:--:--' if left_s is None else timedelta(seconds=int(left_s))}"
        cells = min(_BAR_WIDTH, self._console.width - _PHASE - len(figures) - 1)
        if cells < _LEAST_BAR:
            return _line([Text(figures), Text(what)], self._console.width)
        done = round(cells * min(1.0, step / max(1, self._total)))
        full = "\u2501" if self._console.encoding.startswith("utf") else "#"
        empty = " " if self._console.no_color or self._console.color_system is None else full
        bar = [(full * done, "magenta"), (empty * (cells - done), "bright_black")]
        return Text.assemble((what.ljust(_PHASE), "bold"), *bar, f" {figures}")


def _line(parts: Sequence[Text], width: int) -> Text:
    """Returns as many whole parts as a line of the terminal can hold, two blanks apart; the first in any case."""
    line = Text(no_wrap=True, overflow="crop")
    for part in parts:
        if line and len(line) + 2 + len(part) > width:
            break
        line.append("  " if line else "").append_text(part)
    return line
