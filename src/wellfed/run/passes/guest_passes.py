"""Runs the passes of a run under Lightning's own Trainer: training, validation, test, ceiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from wellfed.batches import Delivery
from wellfed.config.schema import OnOom
from wellfed.errors import OutOfMemoryExhausted, RestartNeeded
from wellfed.observe.loggers.lightning_loggers import for_trainer
from wellfed.observe.timing.readiness import StepSummary, summarise
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.process import StopRequest
from wellfed.ranks import largest_share
from wellfed.run.folder.checkpoint_file import load_checkpoint
from wellfed.run.objects.evaluation import make_eval_loader, named_best
from wellfed.run.objects.guests import batches_per_epoch, wrapped
from wellfed.run.objects.user_callbacks import check_metrics
from wellfed.run.passes.base import Ended, Prune, RunPasses, clock_of
from wellfed.train.guest import ceiling as alone
from wellfed.train.guest.additions import SkipsNonFinite, compile_step
from wellfed.train.guest.arguments import ended_by, explained, make_trainer
from wellfed.train.guest.checkpoint_io import CheckedHooks
from wellfed.train.guest.data import STEPS, Bare, GuestLoaders
from wellfed.train.guest.figures import LoggedFigures
from wellfed.train.guest.marks import Steps, Together, Watch, is_overridden
from wellfed.train.guest.reading import Parts, Place, PlacedLoader, SchedulersOfParts, weighed
from wellfed.train.guest.saves import Saves
from wellfed.train.loop.ceiling import CachedBatches
from wellfed.train.loop.placed_model import misfits
from wellfed.train.loop.training import Limits, Watchers
from wellfed.train.memory.oom import MemoryFailure, classify
from wellfed.train.memory.reasons import way_out
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.memory.step_start import put_back
from wellfed.train.step.loss import add_context
from wellfed.train.step.micro_batches import Preparation
from wellfed.units import counted


class GuestPasses(RunPasses):
    """The passes of one run of a guest, each with a Trainer of Lightning."""

    def _open(self) -> tuple[str, Literal["max", "min"]]:
        config, objects, plan = self._config, self._objects, self._plan
        train = self._changed("train", self._loaders.first) if self._loader is None else self._loader
        self.steps_per_epoch = batches_per_epoch(config, train)
        by_hand = not getattr(objects.model, "automatic_optimization", True)  # a batch may take any number of steps
        self._total_steps = self._limits.total_steps(None if by_hand else self.steps_per_epoch)
        self.module: Any = wrapped(config, objects, plan, self._total_steps, self._books.journal.event)
        if plan.device.compile != "none":
            compile_step(self.module, plan.device.compile)
        self._parts: Parts | None = None
        if plan.memory.accumulate > 1:
            train = getattr(self._loaders.first, "dataset", objects.data.train)
            self._parts = Parts(plan.memory.accumulate, Preparation(train, config.seed).split)
        self._logged = LoggedFigures(self.figures)
        self._read_from: Any = None
        """Loaders that the training has read; None before one."""
        own_name, own_mode = getattr(self.module, "best_of_validation", ("loss", "min"))
        asked = config.trainer.best_mode
        mode: Any = own_mode if asked is None else asked.value
        return named_best(config, objects) or own_name, mode

    # -- loaders --------------------------------------------------------------------------------------------------

    @property
    def _loaders(self) -> GuestLoaders:
        assert self._objects.guest is not None
        return self._objects.guest

    def _open_loader(self) -> Any:
        return None if self._loaders.has("train") else super()._open_loader()

    def evaluates(self, split: str) -> bool:
        """Returns whether there are batches for that split, and the module has a step for it."""
        has_data = self._loaders.has(split) or super().evaluates(split)
        return has_data and is_overridden(self.module, STEPS[split])

    def _split(self, split: str) -> Any:
        """Returns the loader of a split for Lightning; None if the user's module or data module gives it."""
        if self._loaders.owner is not None or not self.evaluates(split):
            return None
        if self._loaders.has(split):
            return self._changed(split, self._loaders.given[split])
        return Bare(make_eval_loader(self._config, self._plan, self._objects.data, split))

    def _changed(self, split: str, loaders: Any) -> Any:
        """Returns the user's loaders with what was typed."""
        return self._loaders.changed(self._config, split, loaders)

    @contextmanager
    def _reading(self, trainer: Any, place: Place | None) -> Iterator[dict[str, Any]]:
        """Yields the arguments of ``Trainer.fit`` that name the loaders."""

        def change(split: str, make: Callable[[], Any]) -> Any:
            given = self._changed(split, make())
            return PlacedLoader(given, place, self._parts) if split == "train" else given

        train = None
        if self._loader is not None:
            train = PlacedLoader(Bare(self._loader), place, self._parts)
        elif self._loaders.owner is None:
            train = change("train", lambda: self._loaders.given["train"])
        with self._loaders.through(change), self._weighed(trainer):
            yield self._loaders.arguments(train_dataloaders=train, val_dataloaders=self._split("val"))

    def _weighed(self, trainer: Any) -> AbstractContextManager[None]:
        return weighed(trainer, self._parts, 1 if self._loader is None else self._num_ranks)

    # -- training -------------------------------------------------------------------------------------------------

    def _fit(
        self, stop: StopRequest, checkpoint: Path | None, clock: StepClock, watchers: Watchers, prune: Prune
    ) -> Ended:
        asked, users = self._config.trainer, self._objects.callbacks
        watch, place = self._watch(clock, users, stop), Place(self._saved_place(checkpoint), self._loader)
        is_skipping = asked.on_nan.value == "skip"
        saves = Saves(
            self._checkpoints,
            self.figures.latest,
            stop,
            watch,
            place,
            by_monitor=asked.best_metric is None,
            check_every_steps=None if is_skipping else asked.log_every_steps,
            prune=prune,
        )
        steps = Steps(clock, watch, watchers)
        checked = [] if asked.trusted_checkpoints else [CheckedHooks()]
        skips = [SkipsNonFinite(self._books.journal.event)] if is_skipping else []
        parts = [] if self._parts is None else [SchedulersOfParts()]
        first = [*checked, place, steps, self._logged, saves.before_users(), *skips, *parts]
        trainer = self._trainer([Together(first), *users.values(), saves], watch, self._limits)
        self._train(trainer, steps, checkpoint, place)
        return saves.pruned or ended_by(self._limits, trainer), saves.pruned is not None

    def _saved_place(self, checkpoint: Path | None) -> Mapping[str, Any] | None:
        """Returns what a checkpoint has of the place in the training data; None for a file of Lightning's own."""
        if checkpoint is None:
            return None
        content = load_checkpoint(checkpoint, (), trusted=self._config.trainer.trusted_checkpoints)
        return content if "position" in content else None

    def _measure(self, limits: Limits, stop: StopRequest, watchers: Watchers, warmup_steps: int) -> None:
        clock = self._clock()
        watch = self._watch(clock, {}, stop)
        steps = Steps(clock, watch, watchers, warmup_steps=warmup_steps)
        users = Together([*self._objects.callbacks.values()], only_steps=True)
        own = Together([steps, self._logged, alone.NoSchedulers()])
        trainer = self._trainer([own, users], watch, limits, validates=False)
        with alone.steps_alone(self.module, is_set_up=False):
            self._train(trainer, steps, None, None)

    def _watch(self, clock: StepClock, callbacks: Mapping[str, Any], stop: StopRequest) -> Watch:
        return Watch(clock, callbacks, stop if self._num_ranks == 1 else None)

    def _try_splits(self) -> None:
        """Warns of metrics that the sanity check of Lightning has not logged."""
        check_metrics(self._config, self._objects, "val", dict.fromkeys(self._logged.of_validation, 0.0))

    def _trainer(
        self, callbacks: Sequence[Any], watch: Watch, limits: Limits, *, logs: bool = True, **more: Any
    ) -> Any:
        """Returns a Trainer of Lightning. ``logs``: what is logged is of the run."""
        if logs:
            more["logger"] = for_trainer(self._books.loggers, self._logged.logged, self._books.folder)
        place, parts = self._place(), self._plan.memory.accumulate
        return make_trainer(
            self._config, place, limits, callbacks, self._books.folder, parts=parts, profiler=watch, **more
        )

    def _train(self, trainer: Any, steps: Steps, checkpoint: Path | None, place: Place | None) -> None:
        """Trains. A step that runs out of memory is not repeated: the module's code may have changed its state."""
        failure: MemoryFailure | None = None
        try:
            with self._reading(trainer, place) as arguments, explained(checkpoint):
                weights_only = None if checkpoint is None else True
                trainer.fit(self.module, **arguments, ckpt_path=checkpoint, weights_only=weights_only)
                self._read_from = trainer.train_dataloader
            return
        except Exception as error:
            failure = classify(error) if steps.is_in_step else None
            # With several ranks the others would wait in the step for the failed one.
            may_restart = self._may_adapt and self._config.memory.on_oom is OnOom.retry and self._num_ranks == 1
            if failure is None or not may_restart:
                add_context(error, self.module)
                raise
        finally:
            self.close()
        # Raised outside of the handler: the handled error refers to all tensors of the step.
        raise self._with_less(failure, steps, trainer)

    def _with_less(self, failure: MemoryFailure, steps: Steps, trainer: Any) -> OutOfMemoryExhausted:
        """Returns the error that ends this training, with changes for a restart that needs less memory."""
        plan, step = self._plan, trainer.global_step + 1
        self._books.journal.event("oom", step=step, message=failure.message)
        samples = max(steps.samples, plan.workload.effective_batch_size)
        before = largest_share(samples, plan.memory.accumulate)
        ran_out = f"Out of memory in step {step} with {counted(before, 'sample')} at a time: {failure.message}"
        if grown := steps.growth.describe():
            return OutOfMemoryExhausted(f"{grown} {ran_out}", failure.kind)
        smaller = MicroBatches(before).step_down()
        if plan.memory.on_oom == "retry" and smaller is not None:
            changes = {"memory.micro_batch": smaller, "memory.accumulate": largest_share(samples, smaller)}
            return RestartNeeded(ran_out, changes, failure.kind)
        others = []
        if smaller is not None:  # the plan does not split steps
            ran_out += f" Its steps are not done in smaller parts: {plan.memory.decided('on_oom').because}."
            others.append(f"workload.effective_batch_size={largest_share(samples, 2)}, which changes what is learned")
        precision = plan.device.precision
        advice = way_out(failure.kind, self.module, trainer.optimizers, precision=precision, others=others)
        return OutOfMemoryExhausted(f"{ran_out} {advice}", failure.kind)

    # -- evaluation and ceiling -----------------------------------------------------------------------------------

    def _test(self, checkpoint: Path | None) -> None:
        watch = Watch(clock_of(is_on_gpu=self._is_on_gpu, wall=self._books.wall), self._objects.callbacks)
        trainer = self._trainer([self._logged, *self._objects.callbacks.values()], watch, self._limits)
        if self._plan.trainer.strategy == "fsdp":  # rank 0 alone knows of a checkpoint, and all ranks load their shards
            checkpoint = trainer.strategy.broadcast(checkpoint)
        with self._loaders.through(lambda split, make: self._changed(split, make())), explained(checkpoint):
            arguments = self._loaders.arguments(dataloaders=self._split("test"))
            weights_only = None if checkpoint is None else True
            trainer.test(self.module, **arguments, ckpt_path=checkpoint, weights_only=weights_only, verbose=False)

    def _artifacts(self) -> dict[str, Path]:
        artifacts = getattr(self.module, "artifacts_of_test", None)
        return {} if artifacts is None else dict(artifacts(self._books.folder))

    def _misfits(self, weights: Mapping[str, Any]) -> list[str]:
        """Returns the first few weights that don't fit; none for a module that may make layers later."""
        may_grow = is_overridden(self.module, "setup") or is_overridden(self.module, "configure_model")
        return [] if may_grow else misfits(self.module, weights)

    def _first_batches(self) -> list[Delivery]:
        if self._loader is not None:
            return super()._first_batches()
        given = self._loaders.given.get("train", [])
        return alone.first_batches(given if self._read_from is None else self._read_from, self._num_ranks)

    def _run_ceiling(self, deliveries: Sequence[Delivery], num_steps: int) -> StepSummary | None:
        rows: list[StepRow] = []
        module, data_module = self.module, self._loaders.data_module
        clock = clock_of(is_on_gpu=self._is_on_gpu)
        is_set_up = module._trainer is not None or self._loaders.owner is module
        watch = Watch(clock, {})
        steps = Steps(clock, watch, Watchers(take_rows=rows.extend))
        own = Together([steps, alone.NoSchedulers()])
        trainer = self._trainer([own], watch, Limits(max_epochs=1), logs=False, validates=False)
        num_steps = alone.least_of_ranks(num_steps if deliveries else 0, trainer)
        if num_steps == 0:
            return None
        for each in deliveries:
            each.batch = trainer.strategy.batch_to_device(each.batch, trainer.strategy.root_device)
        cached = CachedBatches(deliveries, num_steps + WARMUP_STEPS)
        repeated = PlacedLoader(Bare(cached), None, self._parts)
        with (
            put_back(module),
            alone.steps_alone(module, data_module, is_set_up=is_set_up),
            self._loaders.through(lambda split, make: repeated),
            self._weighed(trainer),
        ):
            trainer.fit(module, **self._loaders.arguments(train_dataloaders=repeated))
        return summarise(rows)
