"""Trains a plain model: steps, validations and checkpoints, by plain calls in a fixed order.

A step is fetched, copied, made, scheduled and counted. Then come its validation, the end of its epoch, its checkpoints
and a stop, each if it is due. A checkpoint is thus written after everything that belongs to its step.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.errors import first_line
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.observe.timing.wall import END, EPOCH_END
from wellfed.process import Stopped, StopRequest
from wellfed.sample_rng import seed_from
from wellfed.train.checkpoint_values import readable, save
from wellfed.train.loop.bar import Bar
from wellfed.train.loop.callbacks import Callback, Ema
from wellfed.train.loop.checkpoints import Checkpoints, is_finite, non_finite
from wellfed.train.loop.figures import Figures
from wellfed.train.loop.placed_model import PlacedModel
from wellfed.train.loop.state import load_state, state_of
from wellfed.train.plain_model.scheduling import Rates, nobody_logs
from wellfed.train.step.non_finite import NonFiniteLoss
from wellfed.train.step.train_step import TrainStep

_LOG = logging.getLogger(__name__)
AGREE_EVERY_STEPS = 10
"""Steps between checks whether a rank must stop or save; each is a collective and waits for the device."""


@dataclass(frozen=True)
class Limits:
    """How long a training lasts, and when it is validated; None = no limit, and at the end of each epoch."""

    max_epochs: int | None = None
    max_steps: int | None = None
    max_time_s: float | None = None
    validate_every_steps: int | None = None

    def total_steps(self, steps_per_epoch: int | None) -> int | None:
        """Returns the optimizer steps of the whole run; None if only time limits it or epochs have no length."""
        limits = [] if self.max_steps is None else [self.max_steps]
        if self.max_epochs is not None and steps_per_epoch is not None:
            limits.append(self.max_epochs * steps_per_epoch)
        return min(limits, default=None)


@dataclass(kw_only=True)
class Watchers:
    """Listeners of a training, which change nothing of it."""

    take_rows: Callable[[Iterable[StepRow]], None] = lambda rows: None
    """Takes rows of the step clock."""
    progress: Progress = field(default_factory=Progress)
    bar: Bar | None = None
    trace: Generator[bool] | None = None
    is_slowed: bool = False
    """The trace slows the next step, whose time does not count."""
    sync_search: Generator[None] | None = None
    sanity: Callable[[], None] = lambda: None
    """Tries the evaluations before the first step of a training that is not resumed."""
    on_start: Callable[[], None] = lambda: None
    on_first_batch: Callable[[Mapping[str, int]], None] = lambda by_dtype: None
    """Called with the bytes of the first batch by dtype."""
    on_step: Callable[[int, float, int], None] = lambda steps, epochs, samples: None
    """Called with steps done, epochs done (a fraction), samples of this step over all ranks."""
    on_save: Callable[[], object] = lambda: None
    """Called on each rank before a checkpoint is written."""
    is_measured: Callable[[int], bool] | None = None
    """Returns whether a timed training has enough steps."""

    def begin(self, step: int) -> None:
        """Begins a training that goes on after a step."""
        self.progress.step = step
        self.progress.enter("train")
        self.on_start()
        if self.bar is not None:
            self.bar.begin(step)

    def close(self) -> None:
        """Ends what shows or records the steps."""
        for watcher in (self.sync_search, self.bar, self.trace):
            if watcher is not None:
                watcher.close()


class Training:
    """One training of a plain model. `fit` begins it or goes on with it, and returns at a limit."""

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    rates: Rates
    step: TrainStep

    def __init__(
        self,
        model: PlacedModel,
        loader: Any,
        limits: Limits,
        *,
        clock: StepClock,
        figures: Figures | None = None,
        checkpoints: Checkpoints | None = None,
        validation: Iterable[Delivery] | None = None,
        callbacks: Mapping[str, Callback] | None = None,
        stop: StopRequest | None = None,
        prune: Callable[[int], str | None] = lambda step: None,
        watchers: Watchers | None = None,
        steps_per_epoch: int | None = None,
        warmup_steps: int = WARMUP_STEPS,
    ) -> None:
        """
        Args:
            loader: yields deliveries, epoch after epoch; its position is part of checkpoints.
            validation: the batches of validation, read anew for each; None = nothing is validated.
            steps_per_epoch: None = unknown.
            prune: called after each validation on all ranks; returns why training ends, or None.
        """
        self.model, self.loader, self.limits, self.clock = model, loader, limits, clock
        self.figures = figures or Figures(lambda *values, **about: None, every=2**62, stops_on_nan=False)
        self.checkpoints, self.callbacks, self.watchers = checkpoints, dict(callbacks or {}), watchers or Watchers()
        self.is_trusted = checkpoints is not None and checkpoints.is_trusted
        """Whether checkpoints may hold pickled objects."""
        self.number, self.epoch = 0, 0
        """Steps and epochs done."""
        self.ended_by: str | None = None
        """Reason of the end: a knob with its value, or that of a callback."""
        self.is_pruned = False
        """``prune`` has ended the training."""
        self.elapsed_before_s = 0.0
        """Seconds of training in earlier processes."""
        self._validation, self._stop, self._prune = validation, stop or StopRequest(), prune
        self._place, self._wall = model.place, clock.wall
        self._is_alone = model.place.size == 1
        self._warmup_left, self._steps_per_epoch = warmup_steps, steps_per_epoch
        minutes = None if checkpoints is None else checkpoints.minutes
        self._save_every = None if checkpoints is None else checkpoints.every_steps
        self._save_s = math.inf if minutes is None else 60 * minutes
        self._most_s = math.inf if limits.max_time_s is None else limits.max_time_s
        self._has_stepped = False
        self._saved_at_s = self.began_s = time.monotonic()
        self._due_step, self._due_s = 0.0, math.inf
        """Step, and time, from which something may be due after a step."""
        self._is_best = False
        """The latest validation was the best so far, and is not saved yet."""
        self.ema = next((one for one in self.callbacks.values() if isinstance(one, Ema)), None)
        """The callback that averages weights; None without."""
        self._steppers = [one for one in self.callbacks.values() if type(one).stepped is not Callback.stepped]

    # -- begin and end --------------------------------------------------------------------------------------------

    def fit(self, checkpoint: Path | None = None) -> None:
        """Trains up to a limit, from a checkpoint if one is given.

        Raises:
            ConfigError: the checkpoint can't be gone on from.
            NonFiniteLoss: the loss or a weight is NaN or infinite.
            OutOfMemoryExhausted: memory does not suffice.
            Stopped: a signal asked for it. The state is saved.
        """
        try:
            drawn = self._set_up(checkpoint)
            if self.ended_by is None:
                self._begin()
            if drawn is not None:  # a loader draws nothing from them to get to its place
                generators.restore(dict(drawn), self.model.device)
            self._saved_at_s = time.monotonic()
            self.began_s = self._saved_at_s - self.elapsed_before_s
            self._plan_ahead()
            while self.ended_by is None:
                self._run_epoch()
            self._end()
        except NonFiniteLoss as error:
            if self.checkpoints is not None:
                error.add_note(self.checkpoints.way_back())
            raise
        finally:
            self.watchers.close()
            self._stop.is_stepping = False
        if self._place.any_of([self._stop.signum is not None])[0]:  # the last checkpoint is written
            raise Stopped(self._stop.signum or signal.SIGTERM)

    def _set_up(self, checkpoint: Path | None) -> Mapping[str, Any] | None:
        """Brings model and optimizer to their state before the next step; returns the generators' states of a
        checkpoint."""
        model, files = self.model, self.checkpoints
        model.begin()
        self.optimizer = model.make_optimizer(model.model)
        self.rates = Rates(self.optimizer, model.lr_factor, model.scheduling, self._wall)
        self.scaler = torch.amp.GradScaler(model.device.type) if model.precision.name == "16-mixed" else None
        for callback in self.callbacks.values():
            callback.begin(model.whole)
        drawn = None if checkpoint is None else load_state(self, checkpoint)
        model.hold_features(self.number)
        self.step = model.make_step(self.optimizer, self.scaler, self.clock)
        self.step.number = self._checked_step = self.number  # a checkpoint was checked when it was written
        self.figures.begin(self.number, self.epoch)
        if files is not None:
            files.begin(self.write, self._place.broadcast, self._place.rank)
            if checkpoint is not None:
                files.loaded(checkpoint, self.number)
        self.ended_by = self._limit(is_late=0 < self._most_s <= self.elapsed_before_s) or self._ended_by_callback()
        return drawn

    def _begin(self) -> None:
        number = self.number
        if self.checkpoints is not None and not self.is_trusted:
            readable(state_of(self))  # raises before training, instead of at the first checkpoint
        if number == 0:
            self.watchers.sanity()
        if rank := self._place.rank:
            generators.seed_all(seed_from(self.model.options.seed, rank, number))
        self.watchers.begin(number)

    def _end(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self._wall.switch(END)
        self.watchers.take_rows(self.clock.rows(wait=True))
        if self._validation is not None and self.figures.validated_step != self.number:
            self._save(is_due=True)  # a longer run has no such validation, so callbacks and schedulers don't count it
            self._evaluate()
        self._save(is_due=True)
        if self.checkpoints is not None:
            self.checkpoints.warn_without_best(self.figures.latest)
        for callback in self.callbacks.values():
            callback.end()
        del self.step, self.optimizer, self.rates  # frees their device memory

    # -- steps ----------------------------------------------------------------------------------------------------

    def _run_epoch(self) -> None:
        """Makes steps from the loader's position to the end of its epoch, or of the training."""
        model, clock, step, stop, is_alone = self.model, self.clock, self.step, self._stop, self._is_alone
        length, watchers = len(self.loader), self.watchers
        is_measured = watchers.is_measured
        keep_pace = getattr(self.loader, "keep_pace", None)
        clock.interrupt()
        deliveries = iter(self.loader)
        try:
            while True:
                if keep_pace is not None:
                    keep_pace()
                clock.ask()
                try:
                    if is_alone:  # several ranks stop together, not in a wait
                        stop.begin_wait()
                    delivery = next(deliveries)
                except BaseException:
                    if is_alone and self._has_stepped:
                        self._save_before_stop()
                    raise
                finally:
                    stop.is_stepping = True
                clock.got()
                if not self._has_stepped:
                    self._has_stepped = True
                    watchers.on_first_batch(batches.bytes_by_dtype(delivery.batch))
                clock.copy_begins(delivery.epoch, delivery.took, delivery.copy_ahead_ms)
                model.bring(delivery)
                clock.copied()
                step(delivery)
                self.number += 1
                is_last = delivery.is_last or delivery.index + 1 == length
                self.rates.stepped(is_last)
                self._count(delivery, is_last)
                del delivery  # frees its device memory while the next batch is fetched
                if is_measured is not None and is_measured(self.number):
                    self.ended_by = "measured"
                is_asked = stop.signum is not None and is_alone
                if is_last or is_asked or self.number >= self._due_step or time.monotonic() >= self._due_s:
                    self._after_step(is_last)
                if is_last or self.ended_by is not None:
                    return
        finally:
            deliveries.close()

    def _count(self, delivery: Delivery, is_last: bool) -> None:
        """Counts a step: on the clock, in the record, in the figures and on the screen."""
        number, step, passes, watchers = self.number, self.step, self.step.passes, self.watchers
        samples, figures, wall = delivery.total, self.figures, self._wall
        if not delivery.is_padding and passes.samples != delivery.size:  # as the model counts them
            samples = passes.samples * self._place.size
        is_warmup = self._warmup_left > 0 or step.was_disturbed or watchers.is_slowed
        step.was_disturbed = False
        self._warmup_left -= 1
        if self.clock.end(
            step=number,
            samples=samples,
            micro_batch=passes.largest,
            num_micro=passes.num_micro_batches,
            warmup=is_warmup,
        ):
            watchers.take_rows(self.clock.rows())
        if is_last:
            wall.switch(EPOCH_END)
        if watchers.trace is not None:
            watchers.is_slowed = next(watchers.trace, False)
        if watchers.sync_search is not None:
            next(watchers.sync_search, None)
        part = 0.0 if self._steps_per_epoch is None else (delivery.index + 1) / self._steps_per_epoch
        watchers.on_step(number, delivery.epoch + (1.0 if is_last or part > 1 else part), samples)
        self.epoch = figures.epoch = delivery.epoch
        figures.step = number
        if number % figures.every == 0:
            self._hand_over()
        if watchers.bar is not None:
            watchers.bar.look("training", number)
        for callback in self._steppers:
            before = wall.switch(f"{type(callback).__name__}.step")
            callback.stepped(number)
            wall.back(before)

    def _hand_over(self) -> None:
        """Writes the means of training since the last row. Waits for the device."""
        if self.figures.handed_over_step == self.number:
            return
        values = self.model.totals.take(None if self._is_alone else self._place.mean)
        if values:
            values["lr"] = float(self.optimizer.param_groups[0]["lr"])
        for callback in self.callbacks.values():
            values.update(callback.figures(self.optimizer))
        self.figures.trained(values)

    # -- after a step ---------------------------------------------------------------------------------------------

    def _after_step(self, is_last: bool) -> None:
        """Validates, ends the epoch, saves and stops, each if it is due, in this order."""
        every, number = self.limits.validate_every_steps, self.number
        validates = self._validation is not None and (is_last if every is None else number % every == 0)
        if validates:
            self._evaluate()
            if (reason := self._prune(number)) is not None:
                self.ended_by, self.is_pruned = reason, True
        if is_last:
            self.epoch += 1
            self._hand_over()
        if is_last if every is None else validates:
            self._show_callbacks()
        if self.rates.monitor is not None and (validates or is_last):  # all ranks go by the metrics of rank 0
            self.rates.follow(self._place.broadcast(dict(self.figures.latest)), validates, is_last)
        is_asked = is_time = is_late = False
        if self._is_alone or validates or number % AGREE_EVERY_STEPS == 0:
            now_s = time.monotonic()
            flags = [self._stop.signum is not None, now_s >= self._saved_at_s + self._save_s]
            is_asked, is_time, is_late = self._place.any_of([*flags, now_s >= self.began_s + self._most_s])
        self.ended_by = self.ended_by or self._limit(is_late=is_late)
        if is_asked:
            self._save_before_stop()
            raise Stopped(self._stop.signum or signal.SIGTERM)
        is_due = is_time or (is_last if self._save_every is None else number % self._save_every == 0)
        self._save(is_due=is_due and self.ended_by is None)
        self._plan_ahead()

    def _limit(self, *, is_late: bool) -> str | None:
        """Returns the limit that is reached, as a knob with its value."""
        limits = self.limits
        if limits.max_steps is not None and self.number >= limits.max_steps:
            return f"trainer.max_steps={limits.max_steps}"
        if limits.max_epochs is not None and self.epoch >= limits.max_epochs:
            return f"trainer.max_epochs={limits.max_epochs}"
        return f"trainer.max_time_s={limits.max_time_s:g}" if is_late else None

    def _plan_ahead(self) -> None:
        """Notes from when on something may be due after a step, besides the end of an epoch."""
        rhythms = [self._save_every, None if self._is_alone else AGREE_EVERY_STEPS]
        if self._validation is not None:
            rhythms.append(self.limits.validate_every_steps)
        steps = [(self.number // every + 1) * every for every in rhythms if every]
        self._due_step = min([*steps, self.limits.max_steps or math.inf])
        # Several ranks look at their clocks every few steps.
        self._due_s = min(self._saved_at_s + self._save_s, self.began_s + self._most_s) if self._is_alone else math.inf

    def _show_callbacks(self) -> None:
        """Shows callbacks the latest metrics, by which one may end the training."""
        for name, callback in self.callbacks.items():
            if callback.monitor is not None and callback.monitor not in self.figures.latest:
                raise nobody_logs(f"callbacks.{name}.monitor", callback.monitor, self.figures.latest)
            callback.looked(self.figures.latest)
        self.ended_by = self.ended_by or self._ended_by_callback()

    def _ended_by_callback(self) -> str | None:
        ended = [f"{type(one).__name__}: {one.ended_by}" for one in self.callbacks.values() if one.ended_by is not None]
        return self._place.broadcast(ended[0] if ended else None)

    def _evaluate(self) -> None:
        assert self._validation is not None
        watchers, figures, files = self.watchers, self.figures, self.checkpoints
        look = (lambda: None) if watchers.bar is None else partial(watchers.bar.look, "validating", self.number)
        if watchers.sync_search is not None:
            watchers.sync_search.close()
        with watchers.progress.during("validate"):
            if self.ema is not None:
                self.ema.swap()
            figures.validated(self.model.evaluate("val", self._validation, self.number, look))
            if self.ema is not None:
                self.ema.swap()
        self.clock.interrupt()
        if files is not None:
            self._is_best = self._place.broadcast(files.is_best(figures.latest.get(f"val/{files.best_metric}")))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save(self, *, is_due: bool) -> None:
        """Writes ``best.ckpt`` if the latest validation was the best, and ``last.ckpt`` if that is due, unless it has
        this step already.

        Raises:
            NonFiniteLoss: a weight or the loss is not finite; earlier checkpoints stay.
        """
        files, number = self.checkpoints, self.number
        if files is None or not (self._is_best or (is_due and files.last_step != number)):
            return
        self.clock.interrupt()
        self.watchers.on_save()
        loss = self.model.totals.state_dict()["sums"].get("loss")
        is_good = is_finite(self.model.whole, self.model.device, [] if loss is None else [loss])
        if self._place.any_of([not is_good])[0]:
            raise non_finite(self._checked_step + 1, number)
        self._checked_step = number
        if self._is_best:
            self._is_best = False
            files.save_best(self.figures.latest.get(f"val/{files.best_metric}", math.nan), number)
        if is_due:
            self._saved_at_s = time.monotonic()
            files.save_last(number)

    def _save_before_stop(self) -> None:
        """Saves before a stop, or after an error between two steps. A failure is a warning: the first reason counts."""
        try:
            self._save(is_due=True)
        except Exception as error:  # noqa: BLE001  whatever the user's state raises
            _LOG.warning("The state after step %d could not be saved: %s", self.number, first_line(error))

    def write(self, path: Path, more: Mapping[str, Any]) -> None:
        """Writes the state with more entries, on rank 0. Other ranks take part."""
        content = {**state_of(self), **more}
        if self._place.rank == 0:
            save(content if self.is_trusted else readable(content)[0], path)
