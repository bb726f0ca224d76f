"""Runs the passes of a run of a plain model: training with its validations, test, and the ceiling."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from wellfed import generators
from wellfed.batches import Delivery
from wellfed.config.schema import OnOom
from wellfed.data.own_loader import OwnLoader, loader_of
from wellfed.observe.timing.readiness import StepSummary
from wellfed.observe.timing.step_clock import StepClock
from wellfed.process import StopRequest
from wellfed.run.folder.checkpoint_file import load_checkpoint
from wellfed.run.objects.evaluation import eval_device_prefetch, make_eval_loader, make_metrics
from wellfed.run.objects.optimizers import make_optimizer, make_scheduling
from wellfed.run.objects.user_callbacks import check_metrics
from wellfed.run.passes.base import Ended, Prune, RunPasses, clock_of
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
_MOST_EXAMINED = 200
"""Maximum number of batches examined after a non-finite loss."""


class PlainPasses(RunPasses):
    """The passes of one run of a plain model, which stays on its device from one to the next."""

    def _open(self) -> tuple[str, Literal["max", "min"]]:
        self._shares_evaluation = self._can_share_evaluation()
        self._model = self._placed_model()
        evaluation, trainer = self._model.evaluation, self._config.trainer
        mode: Any = evaluation.best_mode if trainer.best_mode is None else trainer.best_mode.value
        return trainer.best_metric or evaluation.best_metric, mode

    def _can_share_evaluation(self) -> bool:
        data = self._objects.data
        # Each rank reads the whole of a user's loader.
        is_shareable = self._num_ranks > 1 and all(loader_of(data, split) is None for split in ("val", "test"))
        return is_shareable and self._config.workload.metrics is None and can_be_shared(data.evaluation)

    def _placed_model(self) -> PlacedModel:
        config, objects, plan = self._config, self._objects, self._plan
        data, schedule, memory = objects.data, config.workload.schedule, plan.memory
        options = StepOptions(
            gradient_clip=config.trainer.gradient_clip,
            seed=config.seed,
            feature_mode=memory.features,
            compile_mode=plan.device.compile,
            on_oom="retry" if memory.on_oom == "retry" else "fail",
            halve_evaluation_on_oom=config.memory.on_oom is OnOom.retry,
            may_adapt=self._may_adapt,
            on_nan=config.trainer.on_nan.value,
            shares_evaluation=self._shares_evaluation,
        )
        return PlacedModel(
            objects.model,
            self._place(),
            options,
            train_data=data.train,
            eval_data={"val": data.val, "test": data.test},
            micro=MicroBatches(
                memory.micro_batch, is_whole=memory.accumulate == 1 and config.memory.micro_batch is None
            ),
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

    def _fit(
        self, stop: StopRequest, checkpoint: Path | None, clock: StepClock, watchers: Watchers, prune: Prune
    ) -> Ended:
        best = self._config.trainer.best_metric
        if best is not None and not self.evaluates("val"):
            _LOG.warning("trainer.best_metric=%s has no effect: the data has no val split.", best)
        with self._open_split("val") as validation:
            training = self._train(
                self._limits,
                stop,
                checkpoint,
                clock=clock,
                watchers=watchers,
                callbacks=self._objects.callbacks,
                checkpoints=self._checkpoints,
                validation=validation,
                prune=lambda step: self._model.place.broadcast(prune(step)),
            )
        return training.ended_by, training.is_pruned

    def _measure(self, limits: Limits, stop: StopRequest, watchers: Watchers, warmup_steps: int) -> None:
        named = self._objects.callbacks.items()
        callbacks = {name: one for name, one in named if not isinstance(one, EarlyStopping)}  # nothing is validated
        more: dict[str, Any] = {"warmup_steps": warmup_steps, "callbacks": callbacks}
        self._model.scheduling = None  # nothing is validated, and an epoch may never end
        self._train(limits, stop, None, clock=self._clock(), watchers=watchers, **more)

    def _train(self, limits: Limits, stop: StopRequest, checkpoint: Path | None, **more: Any) -> Training:
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

    def _name_sample(self, error: NonFiniteLoss, state: dict[str, Any]) -> None:
        """Makes the error name the sample with a non-finite value, if one of the latest batches has one.

        Args:
            state: position of the loader.
        """
        if isinstance(self._loader, OwnLoader):  # its samples are unknown here
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
            f"{type(self._objects.data.train).__name__}: training sample {found.sample} holds {found.value} "
            f"(epoch {found.epoch}, batch {found.batch}), so the loss is no finite number.",
        )
        error.__notes__ = [f"Repair it, or set {skip}; trainer.on_nan=skip leaves out its whole step."]

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _try_splits(self) -> None:
        """Evaluates a few batches of each split before training, and restores the generators that they draw from."""
        few = self._config.trainer.sanity_batches
        for split in ("val", "test") if few else ():
            if self.evaluates(split):
                loader = make_eval_loader(self._config, self._plan, self._objects.data, split, few=few)
                with generators.kept(loader_of(self._objects.data, split)), closing(loader) as deliveries:
                    metrics = self._model.try_split(split, deliveries)
                if split == "val":
                    check_metrics(self._config, self._objects, metrics)

    @contextmanager
    def _open_split(self, split: str) -> Iterator[Any]:
        """Yields the batches of a split, copied ahead as in training; None if it is not evaluated."""
        if not self.evaluates(split):
            yield None
            return
        share = {"rank": self._rank, "world_size": self._num_ranks} if self._shares_evaluation else {}
        data = self._objects.data
        ahead = eval_device_prefetch(self._plan, data, split)
        with (
            closing(make_eval_loader(self._config, self._plan, data, split, **share)) as loader,
            self._model.prefetched(loader, ahead, is_training=False) as deliveries,
        ):
            yield deliveries

    def _test(self, checkpoint: Path | None) -> None:
        self._model.begin()
        # Rank 0 alone has the folder of the run.
        checkpoint = self._model.place.broadcast(checkpoint and checkpoint.resolve())
        if checkpoint is not None:
            trusted = self._config.trainer.trusted_checkpoints
            self._model.load_of_rank_0(lambda: load_checkpoint(checkpoint, trusted=trusted)["state_dict"])
        self._model.hold_features(self.figures.step)
        with self._open_split("test") as deliveries:
            self.figures.write("test", self._model.evaluate("test", deliveries, self.figures.step))

    def _artifacts(self) -> dict[str, Path]:
        return dict(self._model.evaluation.artifacts(self._books.folder))

    def _misfits(self, weights: Mapping[str, Any]) -> list[str]:
        return misfits(self._model.whole, weights)

    def _run_ceiling(self, deliveries: Sequence[Delivery], num_steps: int) -> StepSummary | None:
        return run_ceiling(self._model, deliveries, num_steps, clock_of(is_on_gpu=self._is_on_gpu))
