"""Runs the passes of a run under Lightning's own Trainer: training, validation, test, ceiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from wellfed.batches import Delivery
from wellfed.config.schema import OnOom
from wellfed.errors import OutOfMemoryExhausted, RestartNeeded
from wellfed.observe.loggers.lightning_loggers import for_trainer
from wellfed.observe.telemetry.run_progress import Progress
from wellfed.observe.timing.readiness import StepSummary, summarise
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.observe.timing.wall import VALIDATION
from wellfed.process import StopRequest
from wellfed.ranks import largest_share
from wellfed.run.folder.checkpoint_file import load_checkpoint
from wellfed.run.objects.evaluation import make_eval_loader, named_best
from wellfed.run.objects.guests import batches_per_epoch, wrapped
from wellfed.run.objects.user_callbacks import check_metrics
from wellfed.run.passes.base import Pruner, RunPasses, clock_of
from wellfed.run.passes.ceiling import Ceiling
from wellfed.run.passes.plain_passes import PRECISE, IsMeasured
from wellfed.train.guest import ceiling as alone
from wellfed.train.guest.additions import SkipsNonFinite, compile_step
from wellfed.train.guest.arguments import Settled, ended_by, explained, make_trainer
from wellfed.train.guest.checkpoint_io import CheckedHooks
from wellfed.train.guest.data import STEPS, Bare, GuestLoaders, arguments_of, changed, replaced, with_changes
from wellfed.train.guest.figures import LoggedFigures, name_in_metrics
from wellfed.train.guest.marks import OF_STEPS, Steps, Together, Watch, is_overridden, latest_of
from wellfed.train.guest.reading import Parts, Place, PlacedLoader, SchedulersOfParts, asks_again, weighing
from wellfed.train.guest.saves import Saves, save_last_as_best
from wellfed.train.guest.watchers import Watchers
from wellfed.train.loop.placed_model import misfits
from wellfed.train.loop.training import Limits
from wellfed.train.memory.breakdown import way_out
from wellfed.train.memory.oom import MemoryFailure, classify
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.step.loss_faults import add_context_of_module
from wellfed.train.step.micro_batches import Preparation
from wellfed.units import counted


class GuestPasses(RunPasses):
    """The passes of one run of a guest, each with a Trainer of Lightning."""

    def _open(self) -> None:
        config, objects, plan, books = self._config, self._objects, self._plan, self._books
        train = self._changed("train", self._loaders.first) if self._loader is None else self._loader
        self.steps_per_epoch = batches_per_epoch(config, train)
        by_hand = not getattr(objects.model, "automatic_optimization", True)  # a batch may take any number of steps
        self._total_steps = self._limits.total_steps(None if by_hand else self.steps_per_epoch)
        self.module: Any = wrapped(config, objects, plan, self._total_steps, books.journal.event)
        if plan.device.compile != "none":
            compile_step(self.module, plan.device.compile)
        self._parts: Parts | None = None
        if plan.memory.accumulate > 1:
            train = getattr(self._loaders.first, "dataset", objects.data.train)
            self._parts = Parts(plan.memory.accumulate, Preparation(train, config.seed).split)
        self._logged = LoggedFigures(self.figures)
        self._read_from: Any = None
        """Loaders that the training has read; None before one."""
        self.ceiling = Ceiling(config, books, self._loader, self._run_ceiling)
        if self._loader is None:
            self.ceiling = _CeilingOfOwn(config, books, self._loaders_of_ceiling, self._run_ceiling)

    def _best(self) -> tuple[str, Literal["max", "min"]]:
        own_name, own_mode = getattr(self.module, "best_of_validation", ("loss", "min"))
        asked = self._config.trainer.best_mode
        mode: Any = own_mode if asked is None else asked.value
        return named_best(self._config, self._objects) or own_name, mode

    # -- loaders --------------------------------------------------------------------------------------------------

    def _loaders_of_ceiling(self) -> Any:
        """Returns the loaders that the training has read, or else those that are given."""
        # A loader may have no length, which its truth would ask for.
        return self._loaders.given.get("train", []) if self._read_from is None else self._read_from

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
        return with_changes(loaders, self._loaders.changes(self._config, split), split)

    @contextmanager
    def _reading(self, trainer: Any, place: Place | None) -> Iterator[dict[str, Any]]:
        """Yields the arguments of ``Trainer.fit`` that name the loaders."""

        def change(split: str, make: Callable[[], Any]) -> Any:
            given = self._changed(split, make())
            return PlacedLoader(given, place, self._parts) if split == "train" else given

        with changed(self._loaders, change), self._weighing(trainer):
            train = None
            if self._loader is not None:
                train = PlacedLoader(Bare(self._loader), place, self._parts)
            elif self._loaders.owner is None:
                train = change("train", lambda: self._loaders.given["train"])
            yield arguments_of(self._loaders, [train, self._split("val")], ["train_dataloaders", "val_dataloaders"])

    def _weighing(self, trainer: Any) -> AbstractContextManager[None]:
        """Returns a context in which losses count by their samples: those of parts, and of the engine's ranks."""
        parts, ranks = self._parts, 1 if self._loader is None else self._num_ranks
        if parts is None and ranks == 1:
            return nullcontext()

        def weight() -> float:
            latest = None if ranks == 1 else latest_of(trainer)
            of_rank = 1.0 if latest is None else 0.0 if latest.is_padding else latest.size * ranks / latest.total
            return of_rank if parts is None else of_rank * parts.weights.popleft()

        weighed = weighing(trainer.strategy.training_step, weight)
        return replaced(trainer.strategy, {"training_step": weighed})

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
        books, asked, users = self._books, self._config.trainer, self._objects.callbacks
        clock = self._clock()
        watch = Watch(clock, users, stop if self._num_ranks == 1 else None)
        place, is_skipping = Place(self._saved_place(checkpoint), self._loader), asked.on_nan.value == "skip"
        saves = Saves(
            self._checkpoints,
            self.figures.latest,
            stop,
            watch,
            place,
            by_monitor=asked.best_metric is None,
            check_every_steps=None if is_skipping else asked.log_every_steps,
            prune=self._pruning(pruner),
        )
        steps = self._steps(clock, watch, on_start, on_save=books.journal.flush)
        skips = [SkipsNonFinite(books.journal.event)] if is_skipping else []
        with ExitStack() as until_end:
            watchers = self._watchers(console, clock, until_end)
            checked = [] if asked.trusted_checkpoints else [CheckedHooks()]
            first = [Settled(), *checked, place, steps, watchers, self._logged, saves.before_users(), *skips]
            trainer = self._trainer(first, [*users.values(), saves], watch, self._limits)
            with self._training():
                self._fit(trainer, steps, checkpoint, place)
                self.ranks.compare()
                books.record.ended_by = saves.pruned or ended_by(self._limits, trainer)
                self._validate_last_step(trainer)
        if saves.pruned is not None:
            self._note_pruned(saves.pruned)

    def _saved_place(self, checkpoint: Path | None) -> Mapping[str, Any] | None:
        """Returns what a checkpoint has of the place in the training data; None for a file of Lightning's own."""
        if checkpoint is None:
            return None
        content = load_checkpoint(checkpoint, (), trusted=self._config.trainer.trusted_checkpoints)
        names = ("position", "rng_of_ranks")
        return {name: content[name] for name in names} if all(name in content for name in names) else None

    def measure(self, most_steps: int, stop: StopRequest, on_start: Callable[[], None]) -> None:
        """Trains to measure the rate, epoch after epoch, without validations and checkpoints.

        Args:
            most_steps: maximum number of steps, without the warm-up.
        """
        clock, warmup = self._clock(), WARMUP_STEPS + self._plan.loader.num_workers  # each worker has a batch ready
        watch = Watch(clock, {}, stop if self._num_ranks == 1 else None)
        more: dict[str, Any] = {}
        if self._num_ranks == 1:  # several would have to agree
            more["is_measured"] = IsMeasured(self._books.journal.summary, PRECISE)
        steps = self._steps(clock, watch, on_start, warmup_steps=warmup, **more)
        users = Together([*self._objects.callbacks.values()], OF_STEPS)
        limits = Limits(max_steps=warmup + most_steps)
        trainer = self._trainer([steps, self._logged, alone.NoSchedulers()], [users], watch, limits, validates=False)
        with self._training(), alone.steps_alone(self.module, is_set_up=False):
            self._fit(trainer, steps, None, None)
        self.ranks.compare()

    def _steps(self, clock: StepClock, watch: Watch, on_start: Callable[[], None], **more: Any) -> Steps:
        books = self._books
        return Steps(
            clock,
            books.journal.steps,
            books.progress,
            watch,
            on_start=on_start,
            on_step=self._stepped,
            on_first=books.first_batch,
            on_batch=self.ranks.on_batch,
            **more,
        )

    def _watchers(self, console: Console, clock: StepClock, until_end: ExitStack) -> Any:
        bar, trace, search = self._bar(console), self._trace(clock), self._sync_search()
        for one in (bar, trace, search):
            if one is not None:
                until_end.enter_context(closing(one))
        return Watchers(bar, trace, search, self._check_metrics)

    def _check_metrics(self, trainer: Any) -> None:
        """Warns of metrics that the sanity check has not logged."""
        found = (name_in_metrics(name, "val") for name in trainer.callback_metrics)
        names = {name[4:]: 0.0 for name in found if name.startswith("val/")}
        check_metrics(self._config, self._objects, "val", names)

    def _trainer(self, first: Sequence[Any], last: Sequence[Any], watch: Watch, limits: Limits, **more: Any) -> Any:
        loggers = for_trainer(self._books.loggers, self._logged.logged, self._books.folder)
        parts = [] if self._parts is None else [SchedulersOfParts()]
        callbacks = [Together([*first, *parts]), *last]
        return self._make_trainer(callbacks, watch, limits, logger=loggers, **more)

    def _make_trainer(self, callbacks: Sequence[Any], watch: Watch, limits: Limits, **more: Any) -> Any:
        where = self._place()
        parts, folder = self._plan.memory.accumulate, self._books.folder
        return make_trainer(self._config, where, limits, callbacks, folder, parts=parts, profiler=watch, **more)

    def _fit(self, trainer: Any, steps: Steps, checkpoint: Path | None, place: Place | None) -> None:
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
            if failure is None or not self._may_restart:
                add_context_of_module(error, self.module)
                raise
        finally:
            self.close()
        # Raised outside of the handler: the handled error refers to all tensors of the step.
        raise self._with_less(failure, steps, trainer)

    @property
    def _may_restart(self) -> bool:
        """Whether training may restart. With several ranks the others would wait in the step for the failed one."""
        return self._may_adapt and self._config.memory.on_oom is OnOom.retry and self._num_ranks == 1

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
        is_whole = asks_again(trainer.optimizers)
        if not is_whole and plan.memory.on_oom == "retry" and smaller is not None:
            changes = {"memory.micro_batch": smaller, "memory.accumulate": largest_share(samples, smaller)}
            return RestartNeeded(ran_out, changes, failure.kind)
        others = []
        if smaller is not None:  # the plan does not split steps
            why = "LBFGS needs whole steps" if is_whole else plan.memory.decided("on_oom").because
            ran_out += f" Its steps are not done in smaller parts: {why}."
            others.append(f"workload.effective_batch_size={largest_share(samples, 2)}, which changes what is learned")
        precision = plan.device.precision
        advice = way_out(failure.kind, self.module, trainer.optimizers, precision=precision, others=others)
        return OutOfMemoryExhausted(f"{ran_out} {advice}", failure.kind)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _validate_last_step(self, trainer: Any) -> None:
        """Validates unless the run has ended with a validation."""
        figures, step = self.figures, trainer.global_step
        if figures.step == 0:  # nothing was left to train
            figures.step, figures.epoch = step, trainer.current_epoch
        if not self.evaluates("val") or figures.validated_step == step:
            return
        with self._books.progress.during("validate"), self._books.wall.during(VALIDATION):
            self._evaluate("val", None)
        value, files = self._latest_best_metric(), self._checkpoints
        if value is not None and self._rank == 0 and files.last_step == step and files.is_best(value):
            save_last_as_best(files, value, step)

    def _evaluate(self, split: str, checkpoint: Path | None) -> None:
        """Makes a pass over validation or test, with the weights of a checkpoint or the current ones."""
        watch = Watch(clock_of(is_on_gpu=self._is_on_gpu, wall=self._books.wall), self._objects.callbacks)
        trainer = self._trainer([self._logged], list(self._objects.callbacks.values()), watch, self._limits)
        if self._plan.trainer.strategy == "fsdp":  # rank 0 alone knows of a checkpoint, and all ranks load their shards
            checkpoint = trainer.strategy.broadcast(checkpoint)
        run = trainer.validate if split == "val" else trainer.test
        as_typed = changed(self._loaders, lambda split, make: self._changed(split, make()))
        with as_typed, explained(checkpoint):
            arguments = arguments_of(self._loaders, [self._split(split)], ["dataloaders"])
            weights_only = None if checkpoint is None else True
            run(self.module, **arguments, ckpt_path=checkpoint, weights_only=weights_only, verbose=False)

    def _artifacts(self) -> dict[str, Path]:
        artifacts = getattr(self.module, "artifacts_of_test", None)
        return {} if artifacts is None else dict(artifacts(self._books.folder))

    def _misfits(self, weights: Mapping[str, Any]) -> list[str]:
        """Returns the first few weights that don't fit; none for a module that may make layers later."""
        may_grow = is_overridden(self.module, "setup") or is_overridden(self.module, "configure_model")
        return [] if may_grow else misfits(self.module, weights)

    # -- the ceiling ----------------------------------------------------------------------------------------------

    def _run_ceiling(self, deliveries: Sequence[Delivery], num_steps: int) -> StepSummary | None:
        rows: list[StepRow] = []
        module, data_module = self.module, self._loaders.data_module
        clock = clock_of(is_on_gpu=self._is_on_gpu)
        is_set_up = module._trainer is not None or self._loaders.owner is module
        watch = Watch(clock, {})
        steps = Steps(clock, rows.extend, Progress(), watch)
        trainer = self._make_trainer([steps, alone.NoSchedulers()], watch, Limits(max_epochs=1), validates=False)
        num_steps = alone.least_of_ranks(num_steps if deliveries else 0, trainer)
        if num_steps == 0:
            return None
        ready = [trainer.strategy.batch_to_device(each.batch, trainer.strategy.root_device) for each in deliveries]
        repeated = PlacedLoader(alone.Repeated(ready, num_steps + WARMUP_STEPS), None, self._parts)
        with (
            alone.put_back(module, data_module),
            alone.steps_alone(module, data_module, is_set_up=is_set_up),
            changed(self._loaders, lambda split, make: repeated),
            self._weighing(trainer),
        ):
            trainer.fit(module, **arguments_of(self._loaders, [repeated], ["train_dataloaders"]))
        return summarise(rows)


class _CeilingOfOwn(Ceiling):
    """Ceiling on batches of the user's own loaders, which a function returns."""

    def _first_batches(self) -> list[Delivery]:
        return alone.first_batches(self._loader())
