"""Runs the passes of a run over its data: training, validation, test, ceiling; each with its callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from wellfed.config.schema import RunConfig
from wellfed.data.own_loader import OwnLoader
from wellfed.errors import ConfigError, LastSaveFailed
from wellfed.observe.loggers.log_media import logged_to
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock
from wellfed.observe.timing.wall import LOGGING, VALIDATION
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
from wellfed.run.objects.user_callbacks import check_metrics
from wellfed.run.passes.ceiling_pass import CeilingPass
from wellfed.run.passes.live_status import LiveStatus
from wellfed.run.passes.model_learner import ModelLearner
from wellfed.run.passes.module_learner import ModuleLearner
from wellfed.run.ranks.coordination import OtherRanks
from wellfed.run.ranks.rank_figures import RankFigures
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import Clock, ModulePhases, StopWhenMeasured, TimedLoader
from wellfed.train.lightning.callbacks.figures import Figures
from wellfed.train.lightning.callbacks.profile import ProfilerTrace
from wellfed.train.lightning.callbacks.progress import ProgressBar, ProgressReport
from wellfed.train.lightning.callbacks.pruning import Pruner, Pruning
from wellfed.train.lightning.callbacks.stop import StopAtStepEnd
from wellfed.train.lightning.callbacks.synchronisations import Synchronisations
from wellfed.train.lightning.checkpoints.checkpoint_files import BEST
from wellfed.train.lightning.checkpoints.checkpoints import CheckpointOptions, Checkpoints
from wellfed.train.lightning.prefetch import prefetched
from wellfed.train.lightning.sanity import SanityCheck
from wellfed.train.step.non_finite import NonFiniteLoss

_MOST_EXAMINED = 200
"""Maximum number of batches examined after a non-finite loss."""


_PRECISE = 0.02
"""Sufficient precision of a timed training: half the 95 % interval of samples/s over the rate."""


class Passes:
    """The passes of one run, with their common objects: learner, loader and the latest figures."""

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
        objects, trainer = objects.for_features(plan.memory.features), config.trainer
        self._config, self._plan, self._books, self._rank = config, plan, books, rank
        self._options = options = _trainer_options(config, plan, is_module=objects.is_lightning_module)
        self.ranks = self._rank_figures(others or OtherRanks(rank))
        """Figures of all ranks."""
        prepare_step(config, plan, objects.model)
        settings = loader_settings(config, plan.loader)
        self._loader = make_train_loader(config, settings, objects.data, rank=rank, on_event=books.journal.event)
        self.steps_per_epoch = self._loader.steps_per_epoch
        """Batches of one pass over the training data; None for a stream of unknown length."""
        steps_by_hand = objects.is_lightning_module and not objects.model.automatic_optimization
        # By hand, a batch may take any number of optimizer steps.
        self._total_steps = lit.total_steps(options, None if steps_by_hand else self.steps_per_epoch)
        self.is_pruned = False
        """A pruner has ended the training early."""
        self._synchronisations: Synchronisations | None = None
        self.figures = figures = Figures(
            self._log,
            every=trainer.log_every_steps,
            stop_on_nan=trainer.on_nan.value == "raise" and not objects.is_lightning_module,
        )
        self._learner: ModelLearner | ModuleLearner
        if objects.is_lightning_module:
            self._learner = ModuleLearner(config, objects, plan, books, options, figures, may_adapt, rank)
        else:
            self._learner = ModelLearner(
                config, objects, plan, books, options, figures, may_adapt, rank, self._total_steps
            )
        self.ceiling = CeilingPass(self._learner, self._loader)
        self._checkpoints = Checkpoints(
            books.folder / CHECKPOINTS,
            CheckpointOptions(
                trainer.checkpoint_every_steps,
                trainer.checkpoint_minutes,
                trainer.keep_last,
                *self._learner.best_metric(),
                trusted=trainer.trusted_checkpoints,
            ),
            figures.latest,
            books.journal.disk_full,
            progress=books.progress,
            finite_step=lambda: figures.handed_over_step if figures.stops_on_nan else 0,
            on_saved=self._saved,
        )

    def check_saved(self) -> None:
        """Raises a LastSaveFailed if the final weights could not be saved."""
        failure = self._checkpoints.failure
        if failure is not None:
            raise LastSaveFailed(self.figures.step, self._checkpoints.folder, failure)

    def check_fits(self, where: str, state: Mapping[str, Any]) -> None:
        """Raises a ConfigError that names the first weights of a checkpoint that don't fit this model."""
        found = self._learner.misfits(state["state_dict"])
        if found:
            problem = f"does not fit workload.model: {'; '.join(found)}."
            way_out = "Set workload.* as it was when it was written, or check out the git commit that run.json names."
            raise ConfigError.of(where, problem, way_out)

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
        training after any validation."""
        self._learner.check_splits()
        clock = self._clock()
        callbacks = self._fit_callbacks(console, clock, on_start)
        validations = 0 if pruner is None else self._books.journal.validations_written()
        pruning = Pruning(pruner, self._latest_best_metric, self._total_steps, validations)
        at_stop = StopAtStepEnd(stop, self._checkpoints.save_before_end, self._checkpoints.call_when_over)
        last = [self._checkpoints, pruning, at_stop]
        trainer = self._learner.training(self._options, callbacks, last)
        self.ranks.begin()
        try:
            with self._books.wall.running(), self._logging_media():
                with self._learner.open_split("val", trainer) as val_batches:
                    self._fit(trainer, clock, val_batches, checkpoint, stop)
                self._end_training(trainer, pruning)
        except BaseException:
            with suppress(Exception):  # the first error counts
                self.ranks.record_latest()  # with those of ranks that have ended
            raise

    def measure(self, most_steps: int, stop: StopRequest, on_start: Callable[[], None]) -> None:
        """Trains to measure the rate, epoch after epoch, without validations and checkpoints. Call it after `warm_up`.
        Batches loaded during a slow first step would hide a slow loader.

        Args:
            most_steps: maximum number of steps, without the warm-up.
        """
        clock, warmup = self._clock(), WARMUP_STEPS + self._plan.loader.num_workers  # each worker has a batch ready
        callbacks = [
            *self._callbacks(Clock(clock, self._books.journal.steps, warmup_steps=warmup), on_start),
            StopWhenMeasured(self._books.journal.summary, _PRECISE),
        ]
        last = [StopAtStepEnd(stop, lambda trainer: None)]
        steps = warmup + most_steps
        options = replace(self._options, max_epochs=None, max_steps=steps, max_time_s=None, validate_every_steps=None)
        self.ranks.begin()
        with self._learner.measuring(), self._books.wall.running():
            self._fit(self._learner.training(options, callbacks, last, is_timed=True), clock, None, None, stop)
        self.ranks.compare()

    def _fit_callbacks(self, console: Console, clock: StepClock, on_start: Callable[[], None]) -> list[Any]:
        config, journal, learner = self._config, self._books.journal, self._learner
        live = LiveStatus(self._books, self._plan, config.workload.sample_unit)
        bar = ProgressBar(console, live.rate, live.parts, total_steps=self._total_steps, latest=self.figures.latest)
        callbacks = [*self._callbacks(Clock(clock, journal.steps, on_save=journal.flush), on_start), bar]
        if config.trainer.profile_steps and self._rank == 0:  # other ranks differ only in their data
            path, steps = self._books.folder / PROFILE, config.trainer.profile_steps
            profiled, interrupt = partial(setattr, self._books.record, "profile"), clock.interrupt
            callbacks.insert(1, ProfilerTrace(path, steps, profiled, on_event=journal.event, interrupt=interrupt))
        if config.trainer.sanity_batches:
            splits = [split for split in ("val", "test") if learner.evaluates(split)]
            few = {split: partial(learner.few, split) for split in splits}
            callbacks.insert(0, SanityCheck(few, partial(check_metrics, config, learner.objects)))
        return callbacks

    def _callbacks(self, clock: Clock, on_start: Callable[[], None]) -> list[Any]:
        """Returns the callbacks that a timed training has, too."""

        def started() -> None:
            on_start()
            for name, part in self._learner.objects.model.named_modules():
                if isinstance(part, torch.nn.DataParallel):
                    module, devices = name or type(part).__name__, len(part.device_ids)
                    self._books.journal.event("data_parallel", module=module, devices=devices)

        is_on_gpu = self._options.accelerator == "gpu"
        record = self._books.record
        self._synchronisations = Synchronisations(partial(setattr, record, "synchronisations")) if is_on_gpu else None
        is_users = self._learner.objects.is_lightning_module
        return [
            clock,
            *([ModulePhases(clock.clock)] if is_users else []),
            *([] if self._synchronisations is None else [self._synchronisations]),
            ProgressReport(self._books.progress, started, self._stepped, self.steps_per_epoch),
            self.figures,
        ]

    def _fit(
        self, trainer: Any, clock: StepClock, val_batches: Any, checkpoint: Path | None, stop: StopRequest
    ) -> None:
        device, learner = trainer.strategy.root_device, self._learner  # this rank's device
        learner.begin_pass()
        with prefetched(self._loader, learner.module, device, self._plan.loader.device_prefetch) as own:
            unwrap, on_first = learner.objects.is_lightning_module, self._books.first_batch
            # Several ranks stop together, not in a wait.
            alone = stop if self._options.world_size == 1 else None
            on_batch = self.ranks.on_batch
            about = {"on_first": on_first, "on_batch": on_batch, "stop": alone, **learner.parts()}
            loader = TimedLoader(own, clock, unwrap=unwrap, **about)
            with nullcontext() if self._synchronisations is None else closing(self._synchronisations):
                try:
                    learner.fit(trainer, loader, val_batches, checkpoint)
                except NonFiniteLoss as error:
                    self._name_sample(error, own.state_dict())
                    raise
        self.close()

    def _name_sample(self, error: NonFiniteLoss, state: dict[str, Any]) -> None:
        """Makes the error name the sample with a non-finite value, if one of the latest batches has one."""
        if isinstance(self._loader, OwnLoader):  # its samples have no numbers
            return
        trainer, config = self._config.trainer, self._config
        steps = 2 * max(trainer.log_every_steps, trainer.checkpoint_every_steps or 0)
        found = None
        with suppress(Exception):  # the run has ended for another reason, which is reported
            found = self._loader.non_finite_sample(state, steps=min(steps, _MOST_EXAMINED))
        if found is None:
            return
        self._books.bad_sample = asdict(found)
        skip = f"loader.skip_ids=[{','.join(map(str, [*config.loader.skip_ids, found.sample]))}]"
        error.args = (
            f"{type(self._learner.objects.data.train).__name__}: training sample {found.sample} holds {found.value} "
            f"(epoch {found.epoch}, batch {found.batch}), so the loss is no finite number.",
        )
        error.__notes__ = [f"Repair it, or set {skip}; trainer.on_nan=skip leaves out its whole step."]

    def _logging_media(self) -> AbstractContextManager[None]:
        """Returns a context in which the workload's code logs pictures and tables. Rank 0 alone logs."""
        books = self._books
        return nullcontext() if self._rank > 0 else logged_to(books.journal.sink, lambda: books.progress.step)

    def _end_training(self, trainer: Any, pruning: Pruning) -> None:
        """Records what ended the training, and validates after its last step."""
        books = self._books
        self.ranks.compare()
        books.record.ended_by = lit.ended_by(trainer, self._options)
        if pruning.reason is not None:
            self.is_pruned, books.record.ended_by = True, pruning.reason
            books.journal.event("pruned", message=pruning.reason)
        if self.figures.step == 0:  # nothing was left to train
            self.figures.step, self.figures.epoch = trainer.global_step, trainer.current_epoch
        self._validate_last_step(trainer.global_step)

    def _rank_figures(self, others: OtherRanks) -> RankFigures:
        launch, books = launched(), self._books
        node = 0 if launch is None else launch.node
        gpu = gpu_label(node, own_local_rank()) if self._options.accelerator == "gpu" else None
        quota = books.record.machine.get("cpu_quota_cores")
        about = {"rank": self._rank, "node": node, "gpu": gpu, "cpu_quota_cores": quota}
        return RankFigures(
            about,
            others.exchange if self._options.world_size > 1 else None,
            rows=lambda: books.journal.rows,
            peak_gib=lambda: books.peak_gib,
            record=books.of_ranks,
        )

    def _stepped(self, steps: int, epochs: float, samples: int) -> None:
        """Counts a step, and brings the figures of the ranks together if that is due."""
        self._books.stepped(steps, epochs, samples)
        if self.ranks.stepped():
            self._books.journal.save()

    def _saved(self, step: int, name: str) -> None:
        """Records a checkpoint, with the figures of all ranks so far."""
        self.ranks.record_latest()
        self._books.saved(step, name, self.figures.latest)

    def _clock(self) -> StepClock:
        device = torch.device("cuda" if self._options.accelerator == "gpu" else "cpu")
        wall = self._books.wall
        if device.type == "cuda":
            wall.wait_for_device = torch.cuda.synchronize
        clock = lit.clock_of(device, origin_s=self._books.journal.origin_s, wall=wall)
        self._books.journal.finished_steps = clock.rows
        return clock

    def _log(self, *figures: Any, **about: Any) -> None:
        """Writes figures to the journal. The time counts as logging."""
        before = self._books.wall.switch(LOGGING)
        self._books.journal.metrics(*figures, **about)
        self._books.wall.back(before)

    def close(self) -> None:
        """Stops worker processes and threads that build training batches."""
        self._loader.close()

    # -- after training -------------------------------------------------------------------------------------------

    def _latest_best_metric(self) -> float | None:
        return self.figures.latest.get(f"val/{self._checkpoints.best_metric}")

    def _validate_last_step(self, step: int) -> None:
        """Validates unless the run has ended with a validation."""
        learner = self._learner
        if not learner.evaluates("val") or self.figures.validated_step == step:
            return
        learner.begin_pass()
        trainer = learner.evaluating([ProgressReport(self._books.progress), self.figures])
        with self._books.wall.during(VALIDATION), self._learner.open_split("val", trainer) as batches:
            trainer.validate(learner.module, batches, verbose=False)
        value = self._latest_best_metric()
        if value is not None and self._rank == 0:
            self._checkpoints.validated_at_end(value, step)

    def test(self) -> dict[str, Path]:
        """Tests the best weights; returns the files that the evaluation wrote."""
        if not self._learner.evaluates("test"):
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
        return {} if self._rank > 0 else self._learner.artifacts()

    def evaluate(self, checkpoint: Path | None) -> dict[str, float]:
        """Returns the metrics of the test split, with a checkpoint's weights or the current ones."""
        if not self._learner.evaluates("test"):
            raise ConfigError.of("workload.data", "has no test split.", "Return Datasets(..., test=...).")
        self._learner.begin_pass()
        trainer = self._learner.evaluating([self.figures])
        with self._learner.open_split("test", trainer) as batches:
            self._learner.test(trainer, batches, checkpoint)
        return {
            name.removeprefix("test/"): value for name, value in self.figures.latest.items() if name.startswith("test/")
        }


def _trainer_options(config: RunConfig, plan: RunPlan, *, is_module: bool) -> lit.TrainerOptions:
    trainer = config.trainer
    return lit.TrainerOptions(
        accelerator=plan.trainer.accelerator,
        devices=plan.trainer.devices,
        num_nodes=plan.trainer.num_nodes,
        strategy=plan.trainer.strategy,
        precision=plan.device.precision,
        max_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
        max_time_s=trainer.max_time_s,
        gradient_clip=trainer.gradient_clip,
        validate_every_steps=trainer.validate_every_steps,
        deterministic=trainer.deterministic,
        trusted_checkpoints=trainer.trusted_checkpoints,
        accumulate=plan.memory.accumulate if is_module else 1,
    )
