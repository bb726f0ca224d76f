"""Makes the passes of a run over its data: training, validation, test, ceiling; each with its callbacks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from wellfed.batches import Delivery
from wellfed.config.schema import OnOom, RunConfig
from wellfed.errors import ConfigError, Fault
from wellfed.lit import guest
from wellfed.lit import trainer as lit
from wellfed.lit.callbacks.checkpoints import BEST, Checkpoints
from wellfed.lit.callbacks.clock import WARMUP_STEPS, BareBatches, Clock, TimedLoader
from wellfed.lit.callbacks.figures import Figures
from wellfed.lit.callbacks.guest_state import GuestCheckpoints
from wellfed.lit.callbacks.measured import StopWhenMeasured
from wellfed.lit.callbacks.non_finite import NonFinite
from wellfed.lit.callbacks.profile import Profile
from wellfed.lit.callbacks.progress import Counts, ProgressBar
from wellfed.lit.callbacks.stop import StopAtStepEnd
from wellfed.lit.callbacks.training_position import Watch
from wellfed.lit.ceiling import steps_alone
from wellfed.lit.evaluating import SHARING_STRATEGIES, can_be_shared
from wellfed.lit.mean_loss import MeanLoss
from wellfed.lit.module import StepModule, StepOptions
from wellfed.lit.prefetch import prefetched
from wellfed.lit.sharding import KeepWeights
from wellfed.memory.ladder import MicroBatches
from wellfed.planning.run_plan import RunPlan
from wellfed.run import assemble
from wellfed.run.assemble import Parts
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.rate_without_data import few_without_workers, first_batches, rate_without_data
from wellfed.run.resume import CHECKPOINTS
from wellfed.step.train_step import parameter_groups
from wellfed.stop_request import StopRequest
from wellfed.timing.step_clock import StepClock

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measure:
    """How long a training that is only timed goes on."""

    steps: int
    """At most, without the warm-up."""
    within: float = 0.02
    """Half the 95 % interval of samples/s over the rate: known well enough."""


class Passes:
    """Holds what the passes share: module, loader, options and the latest figures."""

    def __init__(
        self, config: RunConfig, parts: Parts, plan: RunPlan, books: Bookkeeper, *, rank: int, may_adapt: bool = True
    ) -> None:
        """
        Args:
            may_adapt: where the plan says so; False = out of memory ends it, as a result of its own.
        """
        self._may_adapt, self._rank = may_adapt, rank
        self._config, self._parts, self._plan, self._books = config, parts, plan, books
        self._journal, self._progress, self._folder = books.journal, books.progress, books.folder
        self._is_guest = parts.is_lightning_module
        self.options = _trainer_options(config, plan)
        lit.set_backend_flags(self.options)
        self._loader = assemble.make_train_loader(
            config,
            plan,
            parts.data,
            rank=rank,
            on_event=books.journal.event,
        )
        is_shareable = self.options.devices > 1 and self.options.strategy in SHARING_STRATEGIES
        # What a LightningModule logs may be of its own rank alone: each sees the whole split.
        is_shareable = is_shareable and not self._is_guest
        self._shares_evaluation = is_shareable and can_be_shared(parts.data.evaluation or MeanLoss())
        self._whole = KeepWeights() if plan.trainer.strategy == "fsdp" and not self._is_guest else None
        self._module = self._guest() if self._is_guest else self._step_module()
        self._figures = Figures(
            self._journal.metrics,
            every=config.trainer.log_every_steps,
            stop_on_nan=config.trainer.on_nan.value == "raise" and not self._is_guest,
            throughput=self._journal.recent_throughput,
        )
        self._checkpoints = self._make_checkpoints(books.folder / CHECKPOINTS)

    @property
    def latest(self) -> Mapping[str, float]:
        """The latest figure of each name, ``<split>/<metric>``."""
        return self._figures.latest

    def check_fits(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Whether a checkpoint's weights go into this model.

        Raises:
            ConfigError: they don't; names the first that differ.
        """
        if self._is_guest and guest.builds_itself_later(self._module):
            return
        found = lit.misfits(self._module, state["state_dict"])
        if found:
            problem = f"does not fit workload.model: {'; '.join(found)}."
            way_out = "Set workload.* as it was when the checkpoint was written."
            raise ConfigError([Fault(f"resume={checkpoint}", problem, way_out)])

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the training data."""
        return len(self._loader)

    @property
    def first(self) -> Mapping[str, float]:
        """The first figure of each name in this process: what learning started from."""
        return self._figures.first

    def fit(self, console: Console, stop: StopRequest, checkpoint: Path | None, on_start: Callable[[], None]) -> None:
        """Train, with the validations in between; goes on from a checkpoint if there is one."""
        config, clock = self._config, self._clock()
        bar = ProgressBar(
            console,
            total_steps=lit.total_steps(self.options, len(self._loader)),
            latest=self.latest,
            rate=self._journal.recent_rate,
            unit=config.workload.sample_unit,
        )
        callbacks = [*self._callbacks(Clock(clock, self._journal.steps), on_start), bar]
        if config.trainer.profile_steps:
            callbacks.insert(1, Profile(self._folder / "profile.json", config.trainer.profile_steps))
        keep = [self._checkpoints, StopAtStepEnd(stop, self._checkpoints.save_before_end)]
        trainer = self._training(self.options, callbacks, keep)
        with self._eval_batches("val", trainer) as val_batches:
            self._fit(trainer, clock, val_batches, checkpoint)
        if self._figures.step == 0:  # nothing was left to train
            self._figures.step, self._figures.epoch = trainer.global_step, trainer.current_epoch
        self._validate_last_step(trainer.global_step)

    def measure(self, measure: Measure, stop: StopRequest, on_start: Callable[[], None]) -> None:
        """Train to see how fast it goes, epoch after epoch; validates nothing and keeps nothing.

        To be called when steps have been done already (`warm_up`): batches that are loaded while the first step takes
        its time would be a stock that makes a slow loader look fast for as long as it lasts.
        """
        clock, warmup = self._clock(), WARMUP_STEPS + self._plan.loader.num_workers  # whose first batches come at once
        callbacks = [
            *self._callbacks(Clock(clock, self._journal.steps, warmup_steps=warmup), on_start),
            StopWhenMeasured(self._journal.summary, measure.within),
        ]
        keep = [StopAtStepEnd(stop, lambda trainer: None)]
        options = replace(
            self.options,
            max_epochs=None,
            max_steps=warmup + measure.steps,
            max_time_s=None,
            validate_every_steps=None,
        )
        # A guest's hooks may ask for figures of a validation.
        with steps_alone(self._module, is_set_up=False, moves=True) if self._is_guest else nullcontext():
            self._fit(self._training(options, callbacks, keep), clock, None, None)

    def _clock(self) -> StepClock:
        device = torch.device("cuda" if self.options.accelerator == "gpu" else "cpu")
        return StepClock(origin_s=self._journal.origin_s, new_event=lit.new_event_factory(device))

    def _callbacks(self, clock: Clock, on_start: Callable[[], None]) -> list[Any]:
        return [clock, Watch(self._progress), Counts(on_start, self._books.stepped), self._figures]

    def _training(self, options: lit.TrainerOptions, callbacks: list[Any], last: list[Any]) -> Any:
        """A Trainer to train with; ``last`` are the callbacks that must stand behind all others."""
        if not self._is_guest:
            return lit.make_trainer(options, [*callbacks, *last], self._folder)
        trainer = self._config.trainer
        checkpoints = next((one for one in last if isinstance(one, GuestCheckpoints)), None)
        non_finite = NonFinite(trainer.on_nan.value, every=trainer.log_every_steps, on_event=self._books.journal.event)
        more = guest.training_callbacks(checkpoints, options.devices, non_finite)
        return self._guest_trainer(options, [*callbacks, *more], last)

    def _evaluating(self, callbacks: list[Any]) -> Any:
        """A Trainer for a pass over validation or test data."""
        if self._is_guest:
            return self._guest_trainer(self.options, callbacks, [])
        return lit.make_trainer(self.options, callbacks, self._folder)

    def _guest_trainer(self, options: lit.TrainerOptions, callbacks: list[Any], last: list[Any]) -> Any:
        every = self._config.trainer.log_every_steps
        log = self._figures.logged
        return guest.make_guest_trainer(options, callbacks, self._folder, last=last, log=log, log_every=every)

    def _fit(self, trainer: Any, clock: StepClock, val_batches: Any, checkpoint: Path | None) -> None:
        device = trainer.strategy.root_device  # this rank's own
        self._begin_pass()
        if self._whole is not None:
            trainer.callbacks.append(self._whole)
        with prefetched(self._loader, self._module, device, self._plan.loader.device_prefetch) as batches:
            loader = TimedLoader(batches, clock, unwrap=self._is_guest)
            lit.fit(trainer, self._module, loader, val_batches, checkpoint)
        self._loader.close()

    def test(self) -> dict[str, Path]:
        """Metrics on the test split with the best weights; the files that the evaluation wrote."""
        if not self._evaluates("test"):
            return {}
        self._progress.enter("test")
        best = self._checkpoints.folder / BEST
        self.evaluate(best if best.exists() else None)
        if self._rank > 0 or not isinstance(self._module, StepModule):
            return {}
        return dict(self._module.evaluation.artifacts(self._folder))

    def evaluate(self, checkpoint: Path | None) -> dict[str, float]:
        """Metrics on the test split, with a checkpoint's weights or those at hand.

        Raises:
            ConfigError: the workload has no test split.
        """
        if not self._evaluates("test"):
            raise ConfigError([Fault("workload.data", "has no test split.", "Return Datasets(..., test=...).")])
        self._begin_pass()
        trainer = self._evaluating([self._figures])
        if not self._is_guest and checkpoint is not None:
            lit.load_weights(self._module, checkpoint)
        # A guest's by Lightning: its hooks may make layers first.
        resumed = {"ckpt_path": checkpoint, "weights_only": None if checkpoint is None else True}
        with self._eval_batches("test", trainer) as batches:
            more = resumed if self._is_guest else {}
            trainer.test(self._module, batches, verbose=False, **more)
        return {name.removeprefix("test/"): value for name, value in self.latest.items() if name.startswith("test/")}

    def warm_up(self) -> float | None:
        """Do a few steps on batches that are on the device already; their rate as by `ceiling`.

        Training goes on after these batches: those it begins with are as new to it as all others.
        """
        steps = self._ceiling_steps
        few = few_without_workers(self._config, self._plan, self._parts, self._loader)
        rate = self._rate_without_data(lambda: first_batches(self._loader) if few is None else few, max(1, steps))
        return rate if steps else None

    def ceiling(self) -> float | None:
        """Samples/s on batches already on the device; None if not asked for, or where it can't be told.

        Whatever goes wrong in it is an event, and changes nothing else of a run that is done.
        """
        steps = self._ceiling_steps
        return self._rate_without_data(lambda: first_batches(self._loader), steps) if steps else None

    @property
    def _ceiling_steps(self) -> int:
        return self._config.telemetry.ceiling_steps if self._config.telemetry.enabled else 0

    def _rate_without_data(self, few: Callable[[], list[Delivery]], steps: int) -> float | None:
        self._begin_pass()
        self._progress.enter("ceiling")
        return rate_without_data(self._module, few, self.options, steps, self._folder, self._books.journal.event)

    def _validate_last_step(self, step: int) -> None:
        """The run may have ended between two validations."""
        if not self._evaluates("val") or self._figures.validated_step == step:
            return
        self._begin_pass()
        trainer = self._evaluating([Watch(self._progress), self._figures])
        with self._eval_batches("val", trainer) as batches:
            trainer.validate(self._module, batches, verbose=False)
        value = self.latest.get(f"val/{self._best_metric()[0]}")
        if value is not None and self._rank == 0:
            self._checkpoints.validated_at_end(value, step)

    def _evaluates(self, split: str) -> bool:
        """Whether the workload has such a split, and something to do with it."""
        has_split = getattr(self._parts.data, split) is not None
        return has_split and (not self._is_guest or lit.has_step(self._module, split))

    @contextmanager
    def _eval_batches(self, split: str, trainer: Any) -> Iterator[Any]:
        """A split for a Trainer, built and copied ahead as training's batches are; None where it is not evaluated."""
        if not self._evaluates(split):
            yield None
            return
        data, plan = self._parts.data, self._plan
        share = {"rank": self._rank, "world_size": self.options.devices} if self._shares_evaluation else {}
        loader = assemble.make_eval_loader(self._config, plan, data, split, **share)
        ahead = assemble.eval_device_prefetch(plan, getattr(data, split))
        device = trainer.strategy.root_device
        with closing(loader), prefetched(loader, self._module, device, ahead, what=split) as batches:
            yield BareBatches(batches) if self._is_guest else batches

    def _guest(self) -> Any:
        module, mode = self._parts.model, self._plan.device.compile
        if mode != "none":
            guest.compile_step(
                module, mode, lambda message: self._books.journal.event("compile_failed", message=message)
            )
        return module

    def _begin_pass(self) -> None:
        """A model that was sharded for an earlier pass gives way to another with its weights."""
        if self._whole is not None:
            self._module = self._step_module()
            if self._whole.weights:
                self._module.load_state_dict(self._whole.weights)

    def _step_module(self) -> StepModule:
        config, data, plan = self._config, self._parts.data, self._plan
        schedule = config.workload.schedule
        factor = lit.Schedule(
            schedule.name.value,
            schedule.warmup_steps,
            schedule.min_lr_frac,
            lit.total_steps(self.options, len(self._loader)),
        )
        model, features = self._parts.model, self._parts.features
        if self._whole is not None:
            model = copy.deepcopy(model)
            features = None if features is None else model.features()  # type: ignore[operator]
        return StepModule(
            model,
            train_data=data.train,
            evaluation=data.evaluation,
            eval_data={"val": data.val, "test": data.test},
            features=features,
            feature_rows=self._parts.feature_rows,
            micro=MicroBatches(plan.memory.micro_batch, config.memory.micro_batch_steps),
            options=StepOptions(
                seed=config.seed,
                feature_mode=plan.memory.features,
                compile_mode=plan.device.compile,
                retry_on_oom=plan.memory.on_oom == "retry",
                # Of a sharded model every batch is a collective: ranks must do equally many.
                halve_evaluation_on_oom=config.memory.on_oom is OnOom.retry and plan.trainer.strategy != "fsdp",
                may_adapt=self._may_adapt,
                batches_ahead=plan.loader.device_prefetch,
                on_nan=config.trainer.on_nan.value,
                shares_evaluation=self._shares_evaluation,
            ),
            make_optimizer=lambda model: assemble.make_optimizer(
                config, plan, parameter_groups(model), sparse=self._parts.has_sparse_gradients
            ),
            lr_factor=factor,
            on_event=self._books.journal.event,
        )

    def _best_metric(self) -> tuple[str, Any]:
        """Name and direction."""
        name, mode = self._config.trainer.best_metric, self._config.trainer.best_mode
        own = self._module.evaluation if isinstance(self._module, StepModule) else None
        return (
            name or (own.best_metric if own else "loss"),
            mode.value if mode else own.best_mode if own else "min",
        )

    def _make_checkpoints(self, folder: Path) -> Checkpoints:
        best_metric, best_mode = self._best_metric()
        trainer = self._config.trainer
        made = GuestCheckpoints if self._is_guest else Checkpoints
        return made(
            folder,
            every_steps=trainer.checkpoint_every_steps,
            minutes=trainer.checkpoint_minutes,
            keep_last=trainer.keep_last,
            best_metric=best_metric,
            best_mode=best_mode,
            metrics=self._figures.latest,
            on_disk_error=self._journal.disk_full,
            progress=self._progress,
            finite_step=lambda: self._figures.handed_over_step if self._figures.stops_on_nan else 0,
            on_saved=lambda step, name: self._books.saved(step, name, self.latest),
        )


def _trainer_options(config: RunConfig, plan: RunPlan) -> lit.TrainerOptions:
    trainer = config.trainer
    return lit.TrainerOptions(
        accelerator=plan.trainer.accelerator,
        devices=plan.trainer.devices,
        strategy=plan.trainer.strategy,
        precision=plan.device.precision,
        max_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
        max_time_s=trainer.max_time_s,
        gradient_clip=trainer.gradient_clip,
        validate_every_steps=trainer.validate_every_steps,
        deterministic=trainer.deterministic,
        tf32=plan.device.tf32,
        cudnn_benchmark=config.gpu.cudnn_benchmark,
    )
