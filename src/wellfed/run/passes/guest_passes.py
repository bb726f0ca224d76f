"""Runs the passes of a run under Lightning's own Trainer: training, validation, test, ceiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch

from wellfed.batches import Delivery
from wellfed.config.schema import OnOom
from wellfed.errors import ConfigError, OutOfMemoryExhausted, RestartNeeded
from wellfed.observe.loggers.lightning_loggers import for_trainer
from wellfed.observe.timing.readiness import StepSummary, summarise
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepClock, StepRow
from wellfed.process import StopRequest
from wellfed.ranks import largest_share
from wellfed.run.folder.checkpoint_file import load_checkpoint
from wellfed.run.objects.evaluation import make_eval_loader, named_best
from wellfed.run.objects.guests import batches_per_epoch, wrapped
from wellfed.run.passes.base import Ended, Prune, RunPasses, clock_of
from wellfed.train.guest import ceiling as alone
from wellfed.train.guest.arguments import ended_by, explained, make_trainer
from wellfed.train.guest.checkpoint_io import CheckedHooks
from wellfed.train.guest.data import STEPS, Bare, GuestLoaders, combined, part_of
from wellfed.train.guest.figures import LoggedFigures
from wellfed.train.guest.marks import Steps, Together, Watch, compile_step, is_overridden
from wellfed.train.guest.reading import Place, PlacedLoader, weigh
from wellfed.train.guest.saves import Saves
from wellfed.train.loop.ceiling import CachedBatches
from wellfed.train.loop.placed_model import misfits
from wellfed.train.loop.training import Limits, Watchers
from wellfed.train.memory.oom import MemoryFailure, classify
from wellfed.train.memory.reasons import way_out
from wellfed.train.memory.step_start import put_back
from wellfed.train.step.loss import add_context
from wellfed.units import counted


class GuestPasses(RunPasses):
    """The passes of one run of a guest, each with a Trainer of Lightning."""

    def _open(self) -> tuple[str, Literal["max", "min"]]:
        config, objects, plan = self._config, self._objects, self._plan
        if self._loader is None:
            train = self._loaders.changed(config, "train", self._loaders.first)
            self._changed("train", self._loaders.given.get("train"))  # refuses a loader without smaller batches
        else:
            num_batches, drops_last = len(self._loader), config.workload.drop_last
            train = range(num_batches // self._parts if drops_last else largest_share(num_batches, self._parts))
        self.steps_per_epoch = batches_per_epoch(config, train)
        if self.steps_per_epoch == 0:
            way_out = "Check its samples, batch_size, drop_last and limits."
            raise ConfigError.of("workload.data", "an epoch of training has no batch.", way_out)
        by_hand = not getattr(objects.model, "automatic_optimization", True)  # a batch may take any number of steps
        self._total_steps = self._limits.total_steps(None if by_hand else self.steps_per_epoch)
        self.module: Any = wrapped(config, objects, plan, self._total_steps, self._books.journal.event)
        if plan.device.compile != "none":
            compile_step(self.module, plan.device.compile)
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

    def _open_loader(self, parts: int = 1) -> Any:
        self._parts = self._plan.memory.accumulate
        return None if self._loaders.has("train") else super()._open_loader(self._parts)

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
        """Returns the user's loaders with what was typed, and those of training with batches as they are computed."""
        return self._loaders.changed(self._config, split, loaders, self._parts if split == "train" else 1)

    def _reading(self, trainer: Any, place: Place | None) -> AbstractContextManager[dict[str, Any]]:
        """Returns a context that gives the arguments of ``Trainer.fit`` that name the loaders, read from a place on."""

        def change(split: str, make: Callable[[], Any]) -> Any:
            given = self._changed(split, make())
            return PlacedLoader(given, place, self._parts) if split == "train" else given

        train = None
        if self._loader is not None:
            train = PlacedLoader(Bare(self._loader, drop_last=self._config.workload.drop_last), place, self._parts)
            if self._num_ranks > 1:
                weigh(trainer)
        elif self._loaders.owner is None:
            train = change("train", lambda: self._loaders.given["train"])
        return self._loaders.handed_over(change, train_dataloaders=train, val_dataloaders=self._split("val"))

    # -- training -------------------------------------------------------------------------------------------------

    def _fit(
        self, stop: StopRequest, checkpoint: Path | None, clock: StepClock, watchers: Watchers, prune: Prune
    ) -> Ended:
        asked, users = self._config.trainer, self._objects.callbacks
        watch = Watch(clock)
        place = Place(self._saved_place(checkpoint), self._parts, self._loader)
        saves = Saves(
            self._checkpoints,
            self.figures.latest,
            stop,
            watch,
            place,
            by_monitor=asked.best_metric is None,
            check_every_steps=asked.log_every_steps,
            prune=prune,
        )
        steps = Steps(clock, watchers)
        checked = [] if asked.trusted_checkpoints else [CheckedHooks()]
        first = [*checked, place, steps, self._logged, saves.before_users()]
        trainer = self._trainer([Together(first), *users.values(), saves], watch, self._limits)
        self._train(trainer, steps, checkpoint, place)
        return saves.pruned or ended_by(self._limits, trainer), saves.pruned is not None

    def _saved_place(self, checkpoint: Path | None) -> Mapping[str, Any] | None:
        """Returns what a checkpoint has of the place in the training data; None for a file of Lightning's own."""
        trusted = self._config.trainer.trusted_checkpoints
        content = {} if checkpoint is None else load_checkpoint(checkpoint, (), trusted=trusted)
        return content if "position" in content else None

    def _measure(self, limits: Limits, stop: StopRequest, watchers: Watchers, warmup_steps: int) -> None:
        watch = Watch(clock := self._clock())
        steps = Steps(clock, watchers, warmup_steps=warmup_steps)
        users = Together([*self._objects.callbacks.values()], only_steps=True)
        own = Together([steps, self._logged, alone.NoSchedulers()])
        trainer = self._trainer([own, users], watch, limits, validates=False)
        with alone.steps_alone(self.module, is_set_up=False):
            self._train(trainer, steps, None, None)

    def _try_splits(self) -> None:
        """Does nothing: Lightning's sanity check has tried them."""

    def _trainer(
        self, callbacks: Sequence[Any], watch: Watch, limits: Limits, *, logs: bool = True, validates: bool = True
    ) -> Any:
        """Returns a Trainer of Lightning. ``logs``: what is logged is of the run."""
        folder = self._books.folder
        logger = for_trainer(self._books.loggers, self._logged.logged, folder) if logs else None
        about = (self._config, self._place(), limits, callbacks, folder)
        return make_trainer(*about, parts=self._parts, watch=watch, validates=validates, logger=logger)

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
            failure = classify(error) if steps.largest else None
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
        size = plan.memory.micro_batch or steps.largest
        self._books.journal.event("oom", step=step, message=failure.message)
        ran_out = f"Out of memory in step {step} with {counted(size, 'sample')} at a time: {failure.message}"
        if grown := steps.growth.describe():
            return OutOfMemoryExhausted(f"{grown} {ran_out}", failure.kind)
        times = next((number for number in range(2, size + 1) if size % number == 0), None)
        others = []
        if times is not None and plan.memory.on_oom == "retry":
            try:
                for one in combined(trainer.train_dataloader).flattened if self._loader is None else ():
                    part_of(one, times)
            except ConfigError as error:
                ran_out += f" {error.faults[0]}"
            else:
                return RestartNeeded(ran_out, {"memory.accumulate": self._parts * times}, failure.kind)
        elif times is not None:  # the plan does not split steps
            ran_out += f" Its steps are not done in smaller parts: {plan.memory.decided('on_oom').because}."
            half = largest_share(plan.workload.effective_batch_size or size, 2)
            others.append(f"workload.effective_batch_size={half}, which changes what is learned")
        precision = plan.device.precision
        advice = way_out(failure.kind, self.module, trainer.optimizers, precision=precision, others=others)
        return OutOfMemoryExhausted(f"{ran_out} {advice}", failure.kind)

    # -- evaluation and ceiling -----------------------------------------------------------------------------------

    def _test(self, checkpoint: Path | None) -> None:
        watch = Watch(clock_of(is_on_gpu=self._is_on_gpu, wall=self._books.wall))
        trainer = self._trainer([self._logged, *self._objects.callbacks.values()], watch, self._limits)
        if (trained := self.module._trainer) is not None:  # a test may read epoch and step
            trainer.fit_loop.epoch_progress = trained.fit_loop.epoch_progress
            trainer.fit_loop.epoch_loop.load_state_dict(trained.fit_loop.epoch_loop.state_dict())
        if self._plan.trainer.strategy == "fsdp":  # rank 0 alone knows of a checkpoint, and all ranks load their shards
            checkpoint = trainer.strategy.broadcast(checkpoint)
        own = self._split("test")
        loaders = self._loaders.handed_over(lambda split, make: self._changed(split, make()), dataloaders=own)
        with loaders as arguments, explained(checkpoint):
            weights_only = None if checkpoint is None else True
            trainer.test(self.module, **arguments, ckpt_path=checkpoint, weights_only=weights_only, verbose=False)

    def _artifacts(self) -> dict[str, Path]:
        return dict(getattr(self.module, "artifacts_of_test", lambda folder: {})(self._books.folder))

    def _misfits(self, weights: Mapping[str, Any]) -> list[str]:
        """Returns the first few weights that don't fit; none for a module that may make layers later."""
        may_grow = is_overridden(self.module, "setup") or is_overridden(self.module, "configure_model")
        if not self.module.strict_loading:  # Lightning loads those that both have
            weights = {name: weights.get(name, own) for name, own in self.module.state_dict().items()}
        return [] if may_grow else misfits(self.module, weights)

    def _first_batches(self) -> list[Delivery]:
        if self._loader is not None:
            return super()._first_batches()
        read = self._read_from
        given = self._changed("train", self._loaders.given.get("train", [])) if read is None else read
        return alone.first_batches(given, self._num_ranks)

    def _run_ceiling(self, deliveries: Sequence[Delivery], num_steps: int) -> StepSummary | None:
        rows: list[StepRow] = []
        module, data_module = self.module, self._loaders.data_module
        is_set_up = module._trainer is not None or self._loaders.owner is module
        watch = Watch(clock := clock_of(is_on_gpu=self._is_on_gpu))
        steps = Steps(clock, Watchers(take_rows=rows.extend))
        own = Together([steps, alone.NoSchedulers()])
        trainer = self._trainer([own], watch, Limits(max_epochs=1), logs=False, validates=False)
        mine = torch.tensor(num_steps if deliveries else 0, device=trainer.strategy.root_device)
        num_steps = int(trainer.strategy.reduce(mine, reduce_op="min"))  # none waits for steps that others don't make
        if num_steps == 0:
            return None
        for each in deliveries:
            each.batch = trainer.strategy.batch_to_device(each.batch, trainer.strategy.root_device)
        cached = CachedBatches(deliveries, self._parts * (num_steps + WARMUP_STEPS))
        repeated = PlacedLoader(Bare(cached), None, self._parts)
        with (
            put_back(module),
            alone.steps_alone(module, data_module, is_set_up=is_set_up),
            self._loaders.handed_over(lambda split, make: repeated, train_dataloaders=repeated) as arguments,
        ):
            trainer.fit(module, **arguments)
        return summarise(rows)
