"""Makes what Lightning trains of the configured model: a module of ours around it, or the user's LightningModule."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellfed.config.schema import OnOom, RunConfig
from wellfed.data.streams.stream import Stream
from wellfed.errors import OutOfMemoryExhausted, RestartNeeded
from wellfed.observe.loggers.lightning_loggers import for_trainer
from wellfed.plan.run_plan import RunPlan
from wellfed.ranks import largest_share
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.objects import assemble
from wellfed.train.lightning import guest
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.clock import BareBatches, TimedLoader
from wellfed.train.lightning.callbacks.figures import Figures
from wellfed.train.lightning.callbacks.rank_shares import RankShares
from wellfed.train.lightning.callbacks.users import steps_only, time_hooks, timed_hooks_of
from wellfed.train.lightning.ceiling import HOOKS, replaced, steps_alone
from wellfed.train.lightning.checkpoints.checkpoints import Checkpoints
from wellfed.train.lightning.checkpoints.late_checkpoints import BeforeUsers, LateCheckpoints
from wellfed.train.lightning.data_module import DataModuleCallback
from wellfed.train.lightning.evaluating import SHARING_STRATEGIES
from wellfed.train.lightning.guest import NonFinite, StepMemory
from wellfed.train.lightning.module import StepModule, StepOptions
from wellfed.train.lightning.parts import InParts, SchedulersOfParts, weighing_parts
from wellfed.train.lightning.scheduling import Schedule
from wellfed.train.lightning.sharding import KeepWeights
from wellfed.train.lightning.split_metrics import SplitMetrics, can_be_shared
from wellfed.train.memory import breakdown
from wellfed.train.memory.fallbacks import MicroBatches
from wellfed.train.memory.oom import MemoryFailure
from wellfed.train.step.loss_faults import explained_in_hooks
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.train_step import parameter_groups
from wellfed.units import counted

Best = tuple[str, Any]
"""Name and direction of the metric that picks the best checkpoint."""


def searched_metric(config: RunConfig, parts: assemble.Parts) -> Best:
    """The metric that picks the best checkpoint, before there is anything to train."""
    name, mode = config.trainer.best_metric, config.trainer.best_mode
    own: Best = ("loss", "min")
    if not parts.is_lightning_module:
        evaluation = SplitMetrics(parts.model, parts.data.evaluation, assemble.make_metrics(config))
        own = evaluation.best_metric, evaluation.best_mode
    return name or own[0], own[1] if mode is None else mode.value


@dataclass
class Learner:
    """What both have in common: the configured model, and Trainers for its passes."""

    config: RunConfig
    parts: assemble.Parts
    plan: RunPlan
    books: Bookkeeper
    options: lit.TrainerOptions
    figures: Figures
    may_adapt: bool
    """Where the plan says so; False = out of memory ends the run, as a result of its own."""
    module: Any = field(init=False)
    shares_evaluation: bool = field(default=False, init=False)
    """Among the ranks; what a LightningModule logs may be of its own rank alone: there each sees the whole split."""
    own_best: Best = field(default=("loss", "min"), init=False)

    @property
    def checkpoints(self) -> type[Checkpoints]:
        """What writes the checkpoints of its training."""
        return LateCheckpoints

    def begin_pass(self) -> None:
        """Before each pass over a split."""

    def training(
        self, options: lit.TrainerOptions, callbacks: Sequence[Any], last: Sequence[Any], *, is_timed: bool = False
    ) -> Any:
        """A Trainer to train with; ``last`` are the callbacks that must stand behind all others.

        Args:
            is_timed: no epoch of it counts and nothing is validated: the user's callbacks hear of its steps alone.
        """
        before = [BeforeUsers(one) for one in last if isinstance(one, LateCheckpoints)]
        users = list(self.parts.callbacks.values())
        for user in users if is_timed else ():
            time_hooks(user, self.books.wall)
        return self._trainer(options, [*callbacks, *before], last, steps_only(users) if is_timed else users)

    def evaluating(self, callbacks: Sequence[Any]) -> Any:
        """A Trainer for a pass over validation or test data."""
        return self._trainer(self.options, callbacks, [], list(self.parts.callbacks.values()))

    def _trainer(
        self, options: lit.TrainerOptions, callbacks: Sequence[Any], last: Sequence[Any], users: Sequence[Any]
    ) -> Any:
        asked, books = self.config.trainer, self.books
        return self.known_to_data(
            guest.make_guest_trainer(
                options,
                callbacks,
                books.folder,
                users=users,
                last=last,
                loggers=for_trainer(books.loggers, self.figures.logged, books.folder),
                log_every=asked.log_every_steps,
                sanity_batches=asked.sanity_batches if self.parts.is_lightning_module else 0,
                wall=books.wall,
            )
        )

    def fit(self, trainer: Any, loader: Any, val_batches: Any, checkpoint: Path | None) -> None:
        """Train with a Trainer of `training`; go on from a checkpoint if there is one.

        Raises:
            OutOfMemoryExhausted: memory does not suffice, in no way that is left in this training.
        """
        with replaced(self.module, self._timed_hooks()):
            lit.fit(trainer, self.module, loader, val_batches, checkpoint)

    def _timed_hooks(self) -> dict[str, Any]:
        """Attributes of the module that account for the time of the user's own hooks."""
        return {}

    def in_parts(self, loader: TimedLoader) -> Any:
        """What a Trainer is given to train on, of a loader of whole batches."""
        return loader

    def measuring(self) -> AbstractContextManager[Any]:
        """Around a training that is only timed."""
        return nullcontext()

    def evaluates(self, split: str) -> bool:
        """Whether the workload has such a split, and something to do with it."""
        return getattr(self.parts.data, split) is not None

    def batches(self, deliveries: Any) -> Any:
        """What the Trainer is given of a split."""
        return deliveries

    def artifacts(self) -> dict[str, Path]:
        """The files that the evaluation writes."""
        return {}

    def misfits(self, weights: Mapping[str, Any]) -> list[str]:
        """Weights that don't go into this model, the first few."""
        return lit.misfits(self.module, weights)

    def known_to_data(self, trainer: Any) -> Any:
        """A Trainer, of which a LightningDataModule of the user's is told."""
        if self.parts.data_module is not None:
            trainer.callbacks.insert(0, DataModuleCallback(self.parts.data_module))
        return trainer

    def best_metric(self) -> Best:
        """As the workload's evaluation says, unless the configuration does."""
        name, mode = self.config.trainer.best_metric, self.config.trainer.best_mode
        return name or self.own_best[0], self.own_best[1] if mode is None else mode.value


@dataclass
class ModelLearner(Learner):
    """A plain model, in a `StepModule`."""

    total_steps: int | None
    """Which a learning-rate schedule goes by."""

    def __post_init__(self) -> None:
        is_shareable = self.options.world_size > 1 and self.options.strategy in SHARING_STRATEGIES
        # Of a split that is a stream each rank reads the whole.
        is_shareable &= not any(isinstance(split, Stream) for split in (self.parts.data.val, self.parts.data.test))
        self.shares_evaluation = is_shareable and can_be_shared(self.parts.data.evaluation)
        self._whole = KeepWeights() if self.plan.trainer.strategy == "fsdp" else None
        self.module = self._step_module()
        self.own_best = self.module.evaluation.best_metric, self.module.evaluation.best_mode

    def begin_pass(self) -> None:
        """A model that was sharded for an earlier pass gives way to another with its weights."""
        if self._whole is not None:
            self.module = self._step_module()
            if self._whole.weights:
                self.module.load_state_dict(self._whole.weights)

    @property
    def checkpoints(self) -> type[Checkpoints]:
        """Where nobody goes by a validation, they need not wait for it."""
        return LateCheckpoints if self.module.is_monitored else Checkpoints

    def _trainer(
        self, options: lit.TrainerOptions, callbacks: Sequence[Any], last: Sequence[Any], users: Sequence[Any]
    ) -> Any:
        """With users' callbacks as a guest's; without them nothing stands between the steps."""
        last = [*last, *([] if self._whole is None else [self._whole])]
        if users:
            return super()._trainer(options, callbacks, last, users)
        return self.known_to_data(lit.make_trainer(options, [*callbacks, *last], self.books.folder))

    def test(self, trainer: Any, batches: Any, checkpoint: Path | None) -> None:
        """A pass over the test split, with a checkpoint's weights or those at hand."""
        if checkpoint is not None:
            lit.load_weights(self.module, checkpoint)
        trainer.test(self.module, batches, verbose=False)

    def _timed_hooks(self) -> dict[str, Any]:
        """Steps of the user's own scheduler."""
        return {} if self.module.scheduling is None else timed_hooks_of(self.module, (), self.books.wall)

    def measuring(self) -> AbstractContextManager[Any]:
        """Nothing is validated, and a schedule may be shorter than a measurement."""
        return self.module.unscheduled()  # type: ignore[no-any-return]

    def artifacts(self) -> dict[str, Path]:
        """Those of the workload's evaluation."""
        return dict(self.module.evaluation.artifacts(self.books.folder))

    def _step_module(self) -> StepModule:
        config, parts, plan = self.config, self.parts, self.plan
        data, schedule = parts.data, config.workload.schedule
        model, features = parts.model, parts.features
        if self._whole is not None:
            model = copy.deepcopy(model)
            features = assemble.features_of(data, model)
        return StepModule(
            model,
            train_data=data.train,
            evaluation=data.evaluation,
            metrics=assemble.make_metrics(config),
            eval_data={"val": data.val, "test": data.test},
            features=features,
            feature_rows=parts.feature_rows,
            encoder=parts.encoder,
            micro=MicroBatches(plan.memory.micro_batch, config.memory.micro_batch_steps),
            options=StepOptions(
                seed=config.seed,
                feature_mode=plan.memory.features,
                compile_mode=plan.device.compile,
                retry_on_oom=plan.memory.on_oom == "retry",
                # Of a sharded model every batch is a collective: ranks must do equally many.
                halve_evaluation_on_oom=config.memory.on_oom is OnOom.retry and plan.trainer.strategy != "fsdp",
                may_adapt=self.may_adapt,
                batches_ahead=plan.loader.device_prefetch,
                on_nan=config.trainer.on_nan.value,
                shares_evaluation=self.shares_evaluation,
            ),
            make_optimizer=lambda model: assemble.make_optimizer(
                config,
                plan,
                parameter_groups(model),
                sparse=parts.has_sparse_gradients,
                is_heard=bool(assemble.listeners(parts)),
            ),
            lr_factor=Schedule(schedule.name.value, schedule.warmup_steps, schedule.min_lr_frac, self.total_steps),
            scheduling=assemble.make_scheduling(config),
            is_monitored=bool(parts.callbacks),
            on_event=self.books.event,
        )


@dataclass
class GuestLearner(Learner):
    """A LightningModule of the user's own, which runs its own step."""

    def __post_init__(self) -> None:
        self.module = self.parts.model
        event, mode = self.books.journal.event, self.plan.device.compile
        if mode != "none":
            guest.compile_step(self.module, mode, lambda message: event("compile_failed", message=message))

    def training(
        self, options: lit.TrainerOptions, callbacks: Sequence[Any], last: Sequence[Any], *, is_timed: bool = False
    ) -> Any:
        """As for a model; with what a guest's hooks need."""
        trainer, event = self.config.trainer, self.books.journal.event
        more: list[Any] = [RankShares()] if options.world_size > 1 else []
        more += [SchedulersOfParts()] if options.accumulate > 1 else []
        non_finite = NonFinite(trainer.on_nan.value, every=trainer.log_every_steps, on_event=event)
        for checkpoints in last:
            if isinstance(checkpoints, LateCheckpoints):
                checkpoints.best_by_monitor = trainer.best_metric is None
        return super().training(options, [*callbacks, *more, non_finite], last, is_timed=is_timed)

    def fit(self, trainer: Any, loader: Any, val_batches: Any, checkpoint: Path | None) -> None:
        """A step that runs out of memory can't be done again: what the module's own code has changed is not known.

        Raises:
            RestartNeeded: it can in smaller parts, from the last checkpoint on.
            OutOfMemoryExhausted: nor in smaller ones.
        """
        memory = StepMemory()
        trainer.callbacks.append(memory)
        instead = {"training_step": weighing_parts(self.module)} if self.options.accumulate > 1 else {}
        try:
            with replaced(self.module, instead):
                super().fit(trainer, loader, val_batches, checkpoint)
            return
        except Exception as error:
            if memory.failure is None or not self._may_restart:
                told = explained_in_hooks(error, self.module)
                if told is None:
                    raise
                raise told from error
        # Not while that one is handled, which refers to all that the step had made.
        raise self._with_less(memory.failure, memory.samples, trainer)

    def _timed_hooks(self) -> dict[str, Any]:
        """What changes a batch on its way to the device is a part of the step, and the ceiling has it too."""
        hooks = [hook for hook in HOOKS if not hook.endswith("_batch_transfer")]
        return timed_hooks_of(self.module, hooks, self.books.wall)

    @property
    def _may_restart(self) -> bool:
        """Other ranks would wait within the step for the one that runs out of memory."""
        return self.may_adapt and self.config.memory.on_oom is OnOom.retry and self.options.world_size == 1

    def _with_less(self, failure: MemoryFailure, samples: int, trainer: Any) -> OutOfMemoryExhausted:
        """What ends this training, with what the next one needs less."""
        plan, step = self.plan, trainer.global_step + 1
        self.books.journal.event("oom", step=step, message=failure.message)
        samples = max(samples, plan.workload.effective_batch_size)
        micro = MicroBatches(largest_share(samples, self.options.accumulate), self.config.memory.micro_batch_steps)
        before, smaller = micro.size, micro.step_down()
        ran_out = f"Out of memory in step {step} with {counted(before, 'sample')} at a time: {failure.message}"
        if plan.memory.on_oom == "retry" and smaller is not None:
            changes: dict[str, object] = {
                "memory.micro_batch": smaller,
                "memory.accumulate": largest_share(samples, smaller),
            }
            if plan.loader.device_prefetch:
                changes["loader.device_prefetch"] = 0
            return RestartNeeded(ran_out, changes, failure.kind)
        parts = breakdown.bytes_by_part(self.module, None, None)
        held = (breakdown.bytes_by_part(self.module, each, None)["optimizer state"] for each in trainer.optimizers)
        parts["optimizer state"] = sum(held)
        ahead, precision = plan.loader.device_prefetch, plan.device.precision
        less = breakdown.overrides_with_less(parts, precision=precision, batches_ahead=ahead)
        if smaller is not None:  # than a step, which can't be done in parts
            ran_out += f" Its steps are not done in smaller parts: {plan.memory.decided('on_oom').because}."
            less.append(f"workload.effective_batch_size={largest_share(samples, 2)}, which changes what is learned")
        ways = [*less, "a card with more memory (gpu=...)", "a smaller workload.model, which learns something else"]
        way_out = f"{breakdown.largest_parts(parts)} Next: {'; or '.join(ways)}."
        return OutOfMemoryExhausted(f"{ran_out} {way_out}", failure.kind)

    def in_parts(self, loader: TimedLoader) -> Any:
        """Parts of a batch, where the plan has it so."""
        if self.options.accumulate == 1:
            return loader
        return InParts(loader, self.options.accumulate, Preparation(self.parts.data.train, self.config.seed).split)

    def measuring(self) -> AbstractContextManager[Any]:
        """Its hooks may ask for figures of a validation: it does its steps alone."""
        return steps_alone(self.module, is_set_up=False, moves=True)

    def evaluates(self, split: str) -> bool:
        """The module must have a step for it, too."""
        return super().evaluates(split) and lit.has_step(self.module, split)

    def batches(self, deliveries: Any) -> Any:
        """Batches alone."""
        return BareBatches(deliveries)

    def test(self, trainer: Any, batches: Any, checkpoint: Path | None) -> None:
        """The weights are loaded by Lightning: hooks of the module may make layers first."""
        weights_only = None if checkpoint is None else True
        trainer.test(self.module, batches, verbose=False, ckpt_path=checkpoint, weights_only=weights_only)

    def misfits(self, weights: Mapping[str, Any]) -> list[str]:
        """None are known of a module that makes layers later."""
        return [] if guest.builds_itself_later(self.module) else super().misfits(weights)
