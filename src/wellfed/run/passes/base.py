"""Holds what the passes of all runs need: loader, figures, ranks, checkpoints, and what is written of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from wellfed.batches import Delivery
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError
from wellfed.observe.loggers.log_media import logged_to
from wellfed.observe.timing.interval import MIN_STEPS
from wellfed.observe.timing.readiness import StepSummary
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock
from wellfed.observe.timing.wall import LOGGING
from wellfed.plan.run_plan import RunPlan
from wellfed.process import StopRequest
from wellfed.ranks import gpu_label, launched, own_local_rank
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.closing import PROFILE
from wellfed.run.folder.checkpoint_file import load_checkpoint
from wellfed.run.folder.resume import CHECKPOINTS
from wellfed.run.objects.loaders import loader_settings, make_train_loader
from wellfed.run.objects.models import prepare_step
from wellfed.run.objects.run_objects import RunObjects
from wellfed.run.passes.ceiling import Ceiling
from wellfed.run.passes.live_status import LiveStatus
from wellfed.run.ranks.coordination import OtherRanks
from wellfed.run.ranks.rank_figures import RankFigures
from wellfed.train.loop.bar import Bar
from wellfed.train.loop.ceiling import CEILING_BATCHES
from wellfed.train.loop.checkpoint_files import BEST, LAST
from wellfed.train.loop.checkpoints import Checkpoints
from wellfed.train.loop.figures import Figures
from wellfed.train.loop.place import Place
from wellfed.train.loop.sync_search import find_synchronisations
from wellfed.train.loop.trace import record_steps
from wellfed.train.loop.training import Limits, Watchers

Pruner = Callable[[int, float], "str | None"]
"""Function of a validation's number, from 1, and its metric. Returns why training ends, or None."""
Prune = Callable[[int], "str | None"]
"""Function of the step of a validation. Returns why training ends, or None."""
Ended = tuple["str | None", bool]
"""The cause of the end of a training, and whether that was a pruner."""
PRECISE = 0.02
"""Sufficient precision of a timed training: half the 95 % interval of samples/s over the rate."""


class RunPasses(ABC):
    """Common part of the passes of one run: training with its validations, test, and the ceiling."""

    def __init__(
        self,
        config: RunConfig,
        objects: RunObjects,
        plan: RunPlan,
        books: Bookkeeper,
        *,
        rank: int,
        may_adapt: bool = True,
        others: OtherRanks | None = None,
    ) -> None:
        """``may_adapt=False``: an out-of-memory error ends the run, whatever the plan allows."""
        self._config, self._plan, self._books, self._rank, self._may_adapt = config, plan, books, rank, may_adapt
        self._objects = objects.for_features(plan.memory.features)
        self._num_ranks = plan.trainer.devices * plan.trainer.num_nodes
        self._is_on_gpu = plan.trainer.accelerator == "gpu"
        self.ranks = self._rank_figures(others or OtherRanks(rank))
        """Figures of all ranks."""
        prepare_step(config, plan, objects.model)
        self._loader = self._open_loader()
        self.steps_per_epoch: int | None = getattr(self._loader, "steps_per_epoch", None)
        """Batches of one pass over the training data; None if they are unknown."""
        trainer, every = config.trainer, config.trainer.validate_every_steps
        self._limits = Limits(trainer.max_epochs, trainer.max_steps, trainer.max_time_s, every)
        self._total_steps = self._limits.total_steps(self.steps_per_epoch)
        self.is_pruned = False
        """A pruner has ended the training early."""
        stops_on_nan = objects.guest is None and trainer.on_nan.value == "raise"  # a guest may handle its losses
        self.figures = Figures(self._log, every=trainer.log_every_steps, stops_on_nan=stops_on_nan)
        self.ceiling = Ceiling(config, books, self._first_batches, self._run_ceiling)
        self._checkpoints = self._make_checkpoints(*self._open())

    @abstractmethod
    def _open(self) -> tuple[str, Literal["max", "min"]]:
        """Makes the model as passes of this kind need it; returns metric and mode of the best checkpoint."""

    def _open_loader(self, parts: int = 1) -> Any:
        """Returns the engine's loader of training. ``parts``: batches of a step."""
        settings, about = loader_settings(self._config, self._plan.loader), {"rank": self._rank, "parts": parts}
        on_event = self._books.journal.event
        return make_train_loader(self._config, settings, self._objects.data, **about, on_event=on_event)

    def _make_checkpoints(self, best_metric: str, best_mode: Literal["max", "min"]) -> Checkpoints:
        books = self._books
        return Checkpoints(
            books.folder / CHECKPOINTS,
            self._config.trainer,
            best_metric,
            best_mode,
            books.journal.disk_full,
            progress=books.progress,
            on_saved=self._saved,
        )

    def _place(self) -> Place:
        """Returns where the plan has a model trained."""
        trainer = self._plan.trainer
        return Place(
            accelerator=trainer.accelerator,
            devices=trainer.devices,
            num_nodes=trainer.num_nodes,
            strategy=trainer.strategy,
            precision=self._plan.device.precision,
            deterministic=self._config.trainer.deterministic,
        )

    # -- training -------------------------------------------------------------------------------------------------

    def fit(
        self,
        console: Console,
        stop: StopRequest,
        checkpoint: Path | None,
        on_start: Callable[[], None],
        pruner: Pruner | None = None,
    ) -> None:
        """Trains, with the validations in between; resumes from a checkpoint if there is one. ``pruner`` may end the
        training after any validation.

        Raises:
            RestartNeeded: memory ran out, and training can go on from the last checkpoint in smaller parts.
            OutOfMemoryExhausted: no smaller parts are left.
        """
        clock, flush = self._clock(), self._books.journal.flush
        shown = {"bar": self._bar(console), "trace": self._trace(), "on_save": flush, "sanity": self._try_splits}
        with self._training():
            ended_by, self.is_pruned = self._fit(
                stop, checkpoint, clock, self._watchers(on_start, **shown), self._pruning(pruner)
            )
        self._books.record.ended_by = ended_by
        if self.is_pruned:
            self._books.journal.event("pruned", message=ended_by)

    @abstractmethod
    def _fit(
        self, stop: StopRequest, checkpoint: Path | None, clock: StepClock, watchers: Watchers, prune: Prune
    ) -> Ended:
        """Trains; returns what ended it, and whether ``prune`` did."""

    @abstractmethod
    def _try_splits(self) -> None:
        """Checks what a few batches of evaluation give before training."""

    def measure(self, most_steps: int, stop: StopRequest, on_start: Callable[[], None]) -> None:
        """Trains to measure the rate, epoch after epoch, without validations and checkpoints. Call it after `warm_up`.
        Batches loaded during a slow first step would hide a slow loader.

        Args:
            most_steps: maximum number of steps, without the warm-up.
        """
        warmup = WARMUP_STEPS + self._plan.loader.num_workers  # each worker has a batch ready
        is_alone = self._num_ranks == 1  # several would have to agree
        is_measured = IsMeasured(self._books.journal.summary, PRECISE) if is_alone else None
        watchers = self._watchers(on_start, is_measured=is_measured)
        with self._training():
            self._measure(Limits(max_steps=warmup + most_steps), stop, watchers, warmup)

    @abstractmethod
    def _measure(self, limits: Limits, stop: StopRequest, watchers: Watchers, warmup_steps: int) -> None:
        """Trains without validations and checkpoints."""

    def _watchers(self, on_start: Callable[[], None], **more: Any) -> Watchers:
        """Returns what a timed training has, too, and more."""
        books = self._books
        found = partial(setattr, books.record, "synchronisations")
        return Watchers(
            take_rows=books.journal.steps,
            progress=books.progress,
            sync_search=find_synchronisations(found) if self._is_on_gpu else None,
            on_start=on_start,
            on_first_batch=books.first_batch,
            on_step=self._stepped,
            **more,
        )

    def _clock(self) -> StepClock:
        """Returns the clock of a training, whose rows the journal reads."""
        wall, origin_s = self._books.wall, self._books.journal.origin_s
        if self._is_on_gpu:
            wall.wait_for_device = torch.cuda.synchronize
        clock = clock_of(is_on_gpu=self._is_on_gpu, origin_s=origin_s, wall=wall)
        self._books.journal.finished_steps = clock.rows
        return clock

    def _bar(self, console: Console) -> Bar:
        live = LiveStatus(self._books, self._plan, self._config.workload.sample_unit)
        return Bar(console, live.rate, live.parts, total_steps=self._total_steps, latest=self.figures.latest)

    def _trace(self) -> Generator[bool] | None:
        """Returns the trace of the configured steps; None on ranks other than 0, which differ only in their data."""
        books, steps = self._books, self._config.trainer.profile_steps
        if not steps or self._rank > 0:
            return None
        profiled = partial(setattr, books.record, "profile")
        return record_steps(books.folder / PROFILE, steps, profiled, books.journal.event)

    def _pruning(self, pruner: Pruner | None) -> Prune:
        count = 0 if pruner is None else self._books.journal.validations_written()

        def ask(step: int) -> str | None:
            nonlocal count
            count += 1
            value = self._latest_best_metric()
            if pruner is None or value is None:
                return None
            reason = pruner(count, value)
            return None if self._total_steps is not None and step >= self._total_steps else reason

        return ask

    def _latest_best_metric(self) -> float | None:
        return self.figures.latest.get(f"val/{self._checkpoints.best_metric}")

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Returns a context for a training, whose figures of all ranks are recorded even if it fails."""
        self._name_data_parallel()
        try:
            with self._books.wall.running(), self._logging_media():
                yield
        except BaseException:
            with suppress(Exception):  # the first error counts
                self.ranks.record_latest()  # with those of ranks that have ended
            raise
        self.ranks.compare()

    def _name_data_parallel(self) -> None:
        """Records parts of the model that DataParallel spreads over cards, where nothing can be measured."""
        for name, part in self._objects.model.named_modules():
            if isinstance(part, torch.nn.DataParallel):
                module, devices = name or type(part).__name__, len(part.device_ids)
                self._books.journal.event("data_parallel", module=module, devices=devices)

    def _stepped(self, steps: int, epochs: float, samples: int) -> None:
        """Counts a step, and brings the figures of the ranks together if that is due."""
        self._books.stepped(steps, epochs, samples)
        if self.ranks.stepped():
            self._books.journal.save()

    def _saved(self, step: int, name: str) -> None:
        """Records a checkpoint, with the figures of all ranks so far."""
        self.ranks.record_latest()
        self._books.saved(step, name, self.figures.latest)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluates(self, split: str) -> bool:
        """Returns whether the workload has that split and can evaluate it."""
        return getattr(self._objects.data, split) is not None

    def evaluate(self, checkpoint: Path | None) -> dict[str, float]:
        """Returns the metrics of the test split, with a checkpoint's weights or the current ones."""
        if not self.evaluates("test"):
            raise ConfigError.of("workload.data", "has no test split.", "Return Datasets(..., test=...).")
        self._test(checkpoint)
        latest = self.figures.latest.items()
        return {name.removeprefix("test/"): value for name, value in latest if name.startswith("test/")}

    @abstractmethod
    def _test(self, checkpoint: Path | None) -> None:
        """Makes a pass over the test split, with a checkpoint's weights or the current ones."""

    def test(self) -> dict[str, Path]:
        """Tests the best weights; returns the files that the evaluation wrote."""
        if not self.evaluates("test"):
            return {}
        self._books.progress.enter("test")
        best = self._checkpoints.folder / BEST
        is_there = best.exists()
        with self._logging_media():
            self.evaluate(best if is_there else None)
        tested = f"the weights of step {self.figures.step}, which training ended with"
        if is_there:
            state = load_checkpoint(best, trusted=self._config.trainer.trusted_checkpoints)
            step, picked = state["global_step"], self._checkpoints
            tested = f"the weights of {BEST} of step {step} (best {picked.best_mode} of val/{picked.best_metric})"
        self._books.record.tested = tested
        return {} if self._rank > 0 else self._artifacts()

    @abstractmethod
    def _artifacts(self) -> dict[str, Path]:
        """Returns the files that the evaluation writes."""

    def check_saved(self) -> None:
        """Raises a LastSaveFailed if the final or the best weights could not be saved."""
        if failures := self._checkpoints.failures:
            raise failures.get(LAST) or failures[BEST]

    def check_fits(self, where: str, state: Mapping[str, Any]) -> None:
        """Raises a ConfigError that names the first weights of a checkpoint that don't fit this model."""
        found = self._misfits(state["state_dict"])
        if found:
            problem = f"does not fit workload.model: {'; '.join(found)}."
            way_out = "Set workload.* as it was when it was written, or check out the git commit that run.json names."
            raise ConfigError.of(where, problem, way_out)

    @abstractmethod
    def _misfits(self, weights: Mapping[str, Any]) -> list[str]:
        """Returns the first few weights that don't fit this model."""

    # -- the rest -------------------------------------------------------------------------------------------------

    def _first_batches(self) -> list[Delivery]:
        """Returns the first batches of an epoch, for the ceiling."""
        loader = self._loader  # training continues after them
        loader.load_state_dict({**loader.state_dict(), "epoch": loader.epoch, "batch": 0})
        try:
            return list(islice(loader, CEILING_BATCHES))
        finally:
            loader.close()

    @abstractmethod
    def _run_ceiling(self, deliveries: Sequence[Delivery], num_steps: int) -> StepSummary | None:
        """Times steps on these batches. All ranks call it, also without batches."""

    def close(self) -> None:
        """Stops worker processes and threads that build training batches."""
        if self._loader is not None:
            self._loader.close()

    def _log(self, *figures: Any, **about: Any) -> None:
        """Writes figures to the journal, on rank 0. The time counts as logging."""
        if self._rank > 0:
            return
        before = self._books.wall.switch(LOGGING)
        self._books.journal.metrics(*figures, **about)
        self._books.wall.back(before)

    def _logging_media(self) -> AbstractContextManager[None]:
        """Returns a context in which the workload's code logs pictures and tables. Rank 0 alone logs."""
        books = self._books
        return nullcontext() if self._rank > 0 else logged_to(books.journal.sink, lambda: books.progress.step)

    def _rank_figures(self, others: OtherRanks) -> RankFigures:
        launch, books = launched(), self._books
        node = 0 if launch is None else launch.node
        gpu = gpu_label(node, own_local_rank()) if self._is_on_gpu else None
        about = {"rank": self._rank, "node": node, "gpu": gpu}
        return RankFigures(
            about,
            others.exchange if self._num_ranks > 1 else None,
            rows=lambda: books.journal.rows,
            peak_gib=lambda: books.peak_gib,
            record=books.of_ranks,
        )


class IsMeasured:
    """Whether half the 95 % interval of a rate is ``within`` this share of it."""

    def __init__(self, summary: Callable[[], StepSummary | None], within: float) -> None:
        self._summary, self._within = summary, within
        self._next_look = 0

    def __call__(self, step: int) -> bool:
        """Returns whether the rate is known well enough after this step."""
        if step < self._next_look:
            return False
        found = self._summary()
        steps = 0 if found is None else found.steps
        # The check takes time, so it gets rarer.
        self._next_look = step + max(MIN_STEPS - steps, steps // 4, 1)
        if found is None or found.ci95 is None or steps < MIN_STEPS:
            return False
        low, high = found.ci95
        return found.samples_per_s > 0 and (high - low) / 2 <= self._within * found.samples_per_s


def clock_of(*, is_on_gpu: bool, **settings: Any) -> StepClock:
    """Returns a clock of steps, with events on a GPU. ``settings`` are those of `StepClock`."""
    if is_on_gpu:
        settings["new_event"] = partial(torch.cuda.Event, enable_timing=True)
        settings["current_stream"] = torch.cuda.current_stream
    return StepClock(**settings)
