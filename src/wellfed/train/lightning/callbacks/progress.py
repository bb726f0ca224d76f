"""Reports the progress of training: to telemetry, to the record, and as a bar on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from wellfed.observe.telemetry import run_progress
from wellfed.train.lightning.callbacks.clock import is_within_step, step_samples
from wellfed.units import show_duration


class ProgressReport(pl.Callback):
    """Update of step and phase, which telemetry reads."""

    def __init__(self, progress: run_progress.Progress) -> None:
        self._progress = progress

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._progress.step = trainer.global_step
        self._progress.enter("train")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._progress.step_done(trainer.global_step)

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


class _FiguresBelow(Progress):
    """A bar with its metrics on a separate line."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["figures"], no_wrap=True, overflow="ellipsis")


class ProgressBar(pl.Callback):
    """Steps, time left, rate and the latest metrics; without a terminal one line of plain text a minute."""

    def __init__(
        self,
        console: Console,
        *,
        total_steps: int | None,
        latest: Mapping[str, float],
        rate: Callable[[], float | None],
        unit: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns seconds; tests replace it."""
        self._console, self._clock = console, clock
        self._latest, self._rate, self._unit, self._total = latest, rate, unit, total_steps
        self._progress = _FiguresBelow(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=_BAR_WIDTH),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._redraw_at_s = 0.0
        self._began_s, self._began_at = 0.0, 0
        """When training began, and at which step."""
        self._task: Any = None

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._began_s, self._began_at = self._clock(), trainer.global_step
        if not self._console.is_terminal:
            self._redraw_at_s = self._began_s + LINE_S
        self._progress.start()
        self._task = self._progress.add_task("training", total=self._total, figures="", completed=trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._clock() >= self._redraw_at_s:
            self._redraw("training", trainer.global_step)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._clock() >= self._redraw_at_s:
            self._redraw("validating", trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if not self._progress.disable:  # a disabled one would print an empty line
            self._progress.stop()

    def _redraw(self, what: str, step: int) -> None:
        if self._task is None:
            return
        now_s = self._clock()
        self._redraw_at_s = now_s + (LINE_S if self._progress.disable else REDRAW_S)
        rate = self._rate()
        parts = [f"{rate:,.0f} {self._unit}/s"] if rate else []
        names = sorted((name for name in self._latest if not name.startswith("test/")), key=_comes_later)
        parts += [f"{name} {self._latest[name]:.4g}" for name in names[:4]]
        if self._progress.disable:
            self._console.print(", ".join([self._position(what, step, now_s), *parts]), soft_wrap=True)
            return
        self._progress.update(self._task, description=what, completed=step, figures="  ".join(parts), refresh=True)

    def _position(self, what: str, step: int, now_s: float) -> str:
        """Returns the step, the number of steps, and the time left at the rate so far."""
        total, done = self._total, step - self._began_at
        if total is None:
            return f"{what}: step {step:,}"
        left = f", {show_duration((now_s - self._began_s) / done * (total - step))} left" if done else ""
        return f"{what}: step {step:,} of {total:,}{left}"


def _comes_later(name: str) -> bool:
    """Returns False for losses, which come first: a narrow terminal cuts the line."""
    return not name.endswith("/loss")
