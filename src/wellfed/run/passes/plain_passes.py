"""Runs the passes of a run of a plain model: training with its validations, test, and the ceiling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from wellfed import generators
from wellfed.batches import Delivery
from wellfed.config.schema import OnOom
from wellfed.data.own_loader import loader_of
from wellfed.observe.timing.interval import MIN_STEPS
from wellfed.observe.timing.readiness import StepSummary
from wellfed.observe.timing.step_clock import WARMUP_STEPS
from wellfed.process import StopRequest
from wellfed.run.folder.checkpoint_file import load_checkpoint
from wellfed.run.objects.evaluation import eval_device_prefetch, make_eval_loader, make_metrics
from wellfed.run.objects.optimizers import make_optimizer, make_scheduling
from wellfed.run.objects.user_callbacks import check_metrics
from wellfed.run.passes.base import Pruner, RunPasses, clock_of
from wellfed.run.passes.ceiling import Ceiling
from wellfed.train.loop.callbacks import EarlyStopping
from wellfed.train.loop.ceiling import run_ceiling
from wellfed.train.loop.placed_model import PlacedModel, misfits
from wellfed.train.loop.training import Limits, Training, Watchers
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.plain_model.scheduling import Schedule
from wellfed.train.plain_model.split_metrics import can_be_shared
from wellfed.train.step.non_finite import NonFiniteLoss
from wellfed.train.step.train_step import StepOptions, parameter_groups

_LOG = logging.getLogger(__name__)
PRECISE = 0.02
"""Sufficient precision of a timed training: half the 95 % interval of samples/s over the rate."""


class PlainPasses(RunPasses):
    """The passes of one run of a plain model, which stays on its device from one to the next."""

    def _open(self) -> None:
        self._shares_evaluation = self._can_share_evaluation()
        self._model = self._placed_model()
        self.ceiling = Ceiling(self._config, self._books, self._loader, self._run_ceiling)

    def _best(self) -> tuple[str, Literal["max", "min"]]:
        evaluation, trainer = self._model.evaluation, self._config.trainer
        mode: Any = evaluation.best_mode if trainer.best_mode is None else trainer.best_mode.value
        return trainer.best_metric or evaluation.best_metric, mode

    def _can_share_evaluation(self) -> bool:
        data = self._objects.data
        # Each rank reads the whole of a user's loader.
        is_shareable = self._num_ranks > 1 and all(loader_of(data, split) is None for split in ("val", "test"))
        return is_shareable and can_be_shared(data.evaluation)

    def _placed_model(self) -> PlacedModel:
        config, objects, plan = self._config, self._objects, self._plan
        data, schedule = objects.data, config.workload.schedule
        options = StepOptions(
            gradient_clip=config.trainer.gradient_clip,
            seed=config.seed,
            feature_mode=plan.memory.features,
            compile_mode=plan.device.compile,
            on_oom="retry" if plan.memory.on_oom == "retry" else "fail",
            halve_evaluation_on_oom=config.memory.on_oom is OnOom.retry,
            may_adapt=self._may_adapt,
            batches_ahead=plan.loader.device_prefetch,
            on_nan=config.trainer.on_nan.value,
            shares_evaluation=self._shares_evaluation,
        )
        return PlacedModel(
            objects.model,
            self._place(),
            options,
            train_data=data.train,
            eval_data={"val": data.val, "test": data.test},
            micro=MicroBatches(plan.memory.micro_batch),
            make_optimizer=lambda model: make_optimizer(
                config, plan, parameter_groups(model), sparse=objects.has_sparse_gradients
            ),
            lr_factor=Schedule(schedule.name.value, schedule.warmup_steps, schedule.min_lr_frac, self._total_steps),
            scheduling=make_scheduling(config),
            evaluation=data.evaluation,
            metrics=make_metrics(config),
            features=objects.features,
            on_event=self._books.journal.event,
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
        """Trains, with the validations in between and after the last step; resumes from a checkpoint if there is one.
        ``pruner`` may end the training after any validation."""
        best = self._config.trainer.best_metric
        if best is not None and not self.evaluates("val"):
            _LOG.warning("trainer.best_metric=%s has no effect: the data has no val split.", best)
        books, clock, pruning = self._books, self._clock(), self._pruning(pruner)
        watchers = self._watchers(
            on_start,
            bar=self._bar(console),
            trace=self._trace(clock),
            on_save=books.journal.flush,
            sanity=self._try_splits,
        )
        with self._training(), self._open_split("val") as validation:
            training = self._train(
                self._limits,
                stop,
                checkpoint,
                clock=clock,
                watchers=watchers,
                checkpoints=self._checkpoints,
                validation=validation,
                prune=lambda step: self._model.place.broadcast(pruning(step)),
            )
        self.ranks.compare()
        books.record.ended_by = training.ended_by
        if training.is_pruned:
            self._note_pruned(training.ended_by)

    def measure(self, most_steps: int, stop: StopRequest, on_start: Callable[[], None]) -> None:
        """Trains to measure the rate, epoch after epoch, without validations and checkpoints. Call it after `warm_up`.
        Batches loaded during a slow first step would hide a slow loader.

        Args:
            most_steps: maximum number of steps, without the warm-up.
        """
        warmup = WARMUP_STEPS + self._plan.loader.num_workers  # each worker has a batch ready
        is_alone = self._num_ranks == 1  # several would have to agree
        watchers = self._watchers(
            on_start, is_measured=IsMeasured(self._books.journal.summary, PRECISE) if is_alone else None
        )
        self._model.scheduling = None  # nothing is validated, and an epoch may never end
        with self._training():
            callbacks = {
                name: one for name, one in self._objects.callbacks.items() if not isinstance(one, EarlyStopping)
            }
            more: dict[str, Any] = {"warmup_steps": warmup, "callbacks": callbacks}
            self._train(
                Limits(max_steps=warmup + most_steps), stop, None, clock=self._clock(), watchers=watchers, **more
            )
        self.ranks.compare()

    def _watchers(self, on_start: Callable[[], None], **more: Any) -> Watchers:
        """Returns what a timed training has, too, and more."""
        books = self._books
        return Watchers(
            take_rows=books.journal.steps,
            progress=books.progress,
            sync_search=self._sync_search(),
            on_start=on_start,
            on_first_batch=books.first_batch,
            on_batch=self.ranks.on_batch,
            on_step=self._stepped,
            **more,
        )

    def _train(self, limits: Limits, stop: StopRequest, checkpoint: Path | None, **more: Any) -> Training:
        more = {"callbacks": self._objects.callbacks, **more}
        with self._model.prefetched(self._loader, self._plan.loader.device_prefetch, is_training=True) as own:
            training = Training(
                self._model,
                own,
                limits,
                stop=stop,
                figures=self.figures,
                steps_per_epoch=self.steps_per_epoch,
                **more,
            )
            try:
                training.fit(checkpoint)
            except NonFiniteLoss as error:
                self._name_sample(error, own.state_dict())
                raise
        self.close()
        return training

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _eval_loader(self, split: str, **more: Any) -> Any:
        return make_eval_loader(self._config, self._plan, self._objects.data, split, **more)

    def _try_splits(self) -> None:
        """Evaluates a few batches of each split before training, and restores the generators that they draw from."""
        few = self._config.trainer.sanity_batches
        for split in ("val", "test") if few else ():
            if self.evaluates(split):
                with (
                    generators.kept(loader_of(self._objects.data, split)),
                    closing(self._eval_loader(split, few=few)) as deliveries,
                ):
                    metrics = self._model.try_split(split, deliveries)
                check_metrics(self._config, self._objects, split, metrics)

    @contextmanager
    def _open_split(self, split: str) -> Iterator[Any]:
        """Yields the batches of a split, copied ahead as in training; None if it is not evaluated."""
        if not self.evaluates(split):
            yield None
            return
        share = {"rank": self._rank, "world_size": self._num_ranks} if self._shares_evaluation else {}
        ahead = eval_device_prefetch(self._plan, self._objects.data, split)
        with (
            closing(self._eval_loader(split, **share)) as loader,
            self._model.prefetched(loader, ahead, is_training=False) as deliveries,
        ):
            yield deliveries

    def _evaluate(self, split: str, checkpoint: Path | None) -> None:
        self._model.begin()
        # Rank 0 alone has the folder of the run.
        checkpoint = self._model.place.broadcast(checkpoint and checkpoint.resolve())
        if checkpoint is not None:
            trusted = self._config.trainer.trusted_checkpoints
            self._model.load_of_rank_0(lambda: load_checkpoint(checkpoint, trusted=trusted)["state_dict"])
        self._model.hold_features(self.figures.step)
        with self._open_split(split) as deliveries:
            self.figures.write(split, self._model.evaluate(split, deliveries, self.figures.step))

    def _artifacts(self) -> dict[str, Path]:
        return dict(self._model.evaluation.artifacts(self._books.folder))

    def _misfits(self, weights: Mapping[str, Any]) -> list[str]:
        return misfits(self._model.whole, weights)

    def _run_ceiling(self, deliveries: Sequence[Delivery], steps: int) -> StepSummary | None:
        return run_ceiling(self._model, deliveries, steps, clock_of(is_on_gpu=self._is_on_gpu))


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
