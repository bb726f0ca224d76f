"""Reports the progress of training: to telemetry, to the record, and as a bar on the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
import rich.live
from rich.console import Console, Group
from rich.text import Text

from wellfed.observe.telemetry import run_progress
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.train.lightning.callbacks.clock import is_within_step, step_samples
from wellfed.units import show_duration, show_text


class ProgressReport(pl.Callback):
    """Update of the phase, which telemetry reads; `Counts` reports the steps."""

    def __init__(self, progress: run_progress.Progress) -> None:
        self._progress = progress

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._progress.step = trainer.global_step
        self._progress.enter("train")

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._before = self._progress.phase
        self._progress.enter("validate")

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._progress.enter(self._before)


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
_PASSED = 60
"""Drawings, half a minute on a terminal, whose rate gives the time left."""


class Counts(pl.Callback):
    """Count of steps, epochs and samples after every step, before anything is saved."""

    def __init__(
        self, on_start: Callable[[], None], on_step: Callable[[int, float, int], None], steps_per_epoch: int | None
    ) -> None:
        """``on_step`` is called with steps done, epochs done (a fraction), samples of this step over all ranks."""
        self._on_start, self._on_step, self._steps_per_epoch = on_start, on_step, steps_per_epoch

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._on_start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if is_within_step(trainer):
            return
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        steps = (batch_idx + 1) // trainer.accumulate_grad_batches
        part = 0.0 if self._steps_per_epoch is None else steps / self._steps_per_epoch
        epochs = trainer.current_epoch + (1.0 if is_last or part > 1 else part)
        self._on_step(trainer.global_step, epochs, step_samples(trainer, module, batch))


class LiveFigures(Protocol):
    """Live figures of a run. The bar asks for them when it redraws."""

    def rate(self) -> str:
        """Returns the present rate; empty if unknown."""

    def parts(self) -> Sequence[Text]:
        """Returns the figures of the device or the host, the most important first."""


class ProgressBar(pl.Callback):
    """Steps, time left, rate, latest metrics and live figures; without a terminal one line of plain text a minute."""

    def __init__(
        self,
        console: Console,
        live: LiveFigures,
        *,
        total_steps: int | None,
        latest: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns seconds; tests replace it."""
        self._console, self._live, self._clock = console, live, clock
        self._latest, self._total = latest, total_steps
        self._screen: rich.live.Live | None = None
        self._look_at_s = self._line_at_s = 0.0
        self._began_s = 0.0
        self._passed: deque[tuple[float, int]] = deque(maxlen=_PASSED)
        """Times and steps of the latest drawings since training went on."""
        self._has_paused = False
        self._warm_step = 0
        """Last step of the warm-up, whose time is no guide to that of the others: it compiles and loads kernels."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._began_s = self._clock()
        self._line_at_s = self._began_s + LINE_S
        self._passed.append((self._began_s, trainer.global_step))
        self._warm_step = trainer.global_step + WARMUP_STEPS
        if self._console.is_terminal and not self._console.quiet:
            self._screen = rich.live.Live(console=self._console, auto_refresh=False, transient=True)
            self._screen.start()
            self._console.show_cursor(True)  # the shell keeps its cursor even if this process is killed

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._clock() >= self._look_at_s:
            self._look("training", trainer.global_step)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._clock() >= self._look_at_s:
            self._look("validating", trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        screen, self._screen = self._screen, None
        if screen is not None:
            screen.stop()

    def _look(self, what: str, step: int) -> None:
        """Draws the bar, or prints a line if one is due."""
        now_s = self._clock()
        self._look_at_s = now_s + REDRAW_S
        if self._console.quiet or not self._passed:
            return
        if what != "training":
            self._has_paused = True
        elif self._has_paused:  # the rate is that of training alone
            self._has_paused = False
            self._passed.clear()
        if what == "training":
            if step <= self._warm_step:
                self._passed.clear()
            self._passed.append((now_s, step))
        if self._screen is not None:
            width = self._console.width
            lines = [self._bar(what, step, now_s), _line([Text(one) for one in self._figures()], width)]
            self._screen.update(Group(*lines, _line(self._live.parts(), width)), refresh=True)
        elif not self._console.is_terminal and now_s >= self._line_at_s:
            self._line_at_s = now_s + LINE_S
            parts = [self._position(what, step), *self._figures(), *(part.plain for part in self._live.parts())]
            self._console.print(", ".join(parts), soft_wrap=True)

    def _figures(self) -> list[str]:
        """Returns the rate and the latest metrics of training and validation."""
        names = sorted((name for name in self._latest if not name.startswith("test/")), key=_comes_later)
        figures = [self._live.rate(), *(f"{name} {self._latest[name]:.4g}" for name in names[:4])]
        return [show_text(figure) for figure in figures if figure]

    def _position(self, what: str, step: int) -> str:
        """Returns the step, the number of steps, and the time left."""
        if self._total is None:
            return f"{what}: step {step:,}"
        left_s = self._left_s(step)
        left = "" if left_s is None else f", {show_duration(left_s)} left"
        return f"{what}: step {step:,} of {self._total:,}{left}"

    def _left_s(self, step: int) -> float | None:
        """Returns the seconds left at the rate of the latest drawings; None if unknown."""
        (from_s, from_step), (to_s, to_step) = self._passed[0], self._passed[-1]
        if self._total is None or to_step <= from_step:
            return None
        return (to_s - from_s) / (to_step - from_step) * max(0, self._total - step)

    def _bar(self, what: str, step: int, now_s: float) -> Text:
        """Returns phase, bar, count, time and time left; a narrow terminal drops the bar, then phase and time."""
        left_s = self._left_s(step)
        eta = f"ETA {'-:--:--' if left_s is None else _clock_time(left_s)}"
        if self._total is None:
            return _line(
                [Text(what, "bold"), Text(f"step {step} {_clock_time(now_s - self._began_s)}")], self._console.width
            )
        count = f"{step}/{self._total}"
        figures = f"{count} {_clock_time(now_s - self._began_s)} {eta}"
        cells = min(_BAR_WIDTH, self._console.width - _PHASE - len(figures) - 1)
        if cells < _LEAST_BAR:
            whole = f"{what} {figures}"
            return Text(whole if len(whole) <= self._console.width else f"{count} {eta}")
        done = round(cells * min(1.0, step / max(1, self._total)))
        full = "\u2501" if self._console.encoding.startswith("utf") else "#"
        empty = " " if self._console.no_color or self._console.color_system is None else full
        return Text.assemble(
            (what.ljust(_PHASE), "bold"),
            (full * done, "magenta"),
            (empty * (cells - done), "bright_black"),
            f" {figures}",
        )


def _line(parts: Sequence[Text], width: int) -> Text:
    """Returns as many whole parts as a line of the terminal can hold, two blanks apart; the first in any case."""
    line = Text(no_wrap=True, overflow="crop")
    for part in parts:
        if line and len(line) + 2 + len(part) > width:
            break
        line.append("  " if line else "").append_text(part)
    return line


def _clock_time(seconds: float) -> str:
    """Returns a duration as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _comes_later(name: str) -> bool:
    """Returns False for losses, which come first: a narrow terminal cuts the line."""
    return not name.endswith("/loss")
