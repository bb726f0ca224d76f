"""Trains a plain model, inside a module of ours."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellfed.config.schema import OnOom
from wellfed.data.own_loader import loader_of
from wellfed.run.objects.evaluation import make_metrics
from wellfed.run.objects.models import features_of, step_listeners
from wellfed.run.objects.optimizers import make_optimizer, make_scheduling
from wellfed.run.passes.learner import Learner
from wellfed.train.lightning import trainer as lit
from wellfed.train.lightning.callbacks.users import timed_hooks_of
from wellfed.train.lightning.module import StepModule
from wellfed.train.lightning.sharding import KeepWeights
from wellfed.train.memory.step_down import MicroBatches
from wellfed.train.plain_model.evaluating import SHARING_STRATEGIES
from wellfed.train.plain_model.plain_training import PlainSetup
from wellfed.train.plain_model.scheduling import Schedule
from wellfed.train.plain_model.split_metrics import can_be_shared
from wellfed.train.step.train_step import StepOptions, parameter_groups


@dataclass
class ModelLearner(Learner):
    """A plain model, in a `StepModule`."""

    total_steps: int | None
    """Steps of the learning-rate schedule."""

    def __post_init__(self) -> None:
        data = self.objects.data
        is_shareable = self.options.world_size > 1 and self.options.strategy in SHARING_STRATEGIES
        # Each rank reads the whole of a user's loader.
        is_shareable &= all(loader_of(data, split) is None for split in ("val", "test"))
        self.shares_evaluation = is_shareable and can_be_shared(data.evaluation)
        self._whole = KeepWeights() if self.plan.trainer.strategy == "fsdp" else None
        self.module = self._step_module()
        evaluation = self.module.plain.evaluation
        self.own_best = evaluation.best_metric, evaluation.best_mode

    def begin_pass(self) -> None:
        """Replaces a model that an earlier pass has sharded by a new one with its weights."""
        if self._whole is not None:
            self.module = self._step_module()
            if self._whole.weights:
                self.module.load_state_dict(self._whole.weights)

    def _trainer(
        self, options: lit.TrainerOptions, callbacks: Sequence[Any], last: Sequence[Any], users: Sequence[Any]
    ) -> Any:
        last = [*last, *([] if self._whole is None else [self._whole])]
        if users:
            return super()._trainer(options, callbacks, last, users)
        # Without gradients, but not in inference mode: a loss may ask for some by torch.enable_grad().
        made = lit.make_trainer(options, [*callbacks, *last], self.books.folder, inference_mode=False)
        return self._with_data_module(made)

    def test(self, trainer: Any, batches: Any, checkpoint: Path | None) -> None:
        """Runs a pass over the test split, with a checkpoint's weights or the current ones."""
        if checkpoint is not None:
            lit.load_weights(self.module, checkpoint, trusted=self.config.trainer.trusted_checkpoints)
        trainer.test(self.module, batches, verbose=False)

    def _timed_hooks(self) -> dict[str, Any]:
        """Returns the steps of the user's own scheduler, timed."""
        return {} if self.module.plain.scheduling is None else timed_hooks_of(self.module, (), self.books.wall)

    def measuring(self) -> AbstractContextManager[Any]:
        """Returns a context without schedule: nothing is validated, and the schedule may end too early."""
        return self.module.plain.unscheduled()  # type: ignore[no-any-return]

    def artifacts(self) -> dict[str, Path]:
        """Returns the files that the workload's evaluation writes."""
        return dict(self.module.plain.evaluation.artifacts(self.books.folder))

    def _step_module(self) -> StepModule:
        config, objects, plan = self.config, self.objects, self.plan
        data, schedule = objects.data, config.workload.schedule
        model, features = objects.model, objects.features
        if self._whole is not None:
            model = copy.deepcopy(model)
            features = features_of(data, model)
        setup = PlainSetup(
            train_data=data.train,
            eval_data={"val": data.val, "test": data.test},
            micro=MicroBatches(plan.memory.micro_batch),
            options=StepOptions(
                seed=config.seed,
                feature_mode=plan.memory.features,
                compile_mode=plan.device.compile,
                on_oom="retry" if plan.memory.on_oom == "retry" else "fail",
                # With a sharded model every batch is a collective: ranks must do equally many.
                halve_evaluation_on_oom=config.memory.on_oom is OnOom.retry and plan.trainer.strategy != "fsdp",
                may_adapt=self.may_adapt,
                batches_ahead=plan.loader.device_prefetch,
                on_nan=config.trainer.on_nan.value,
                shares_evaluation=self.shares_evaluation,
            ),
            make_optimizer=lambda model: make_optimizer(
                config,
                plan,
                parameter_groups(model),
                sparse=objects.has_sparse_gradients,
                has_listeners=bool(step_listeners(objects)),
            ),
            lr_factor=Schedule(schedule.name.value, schedule.warmup_steps, schedule.min_lr_frac, self.total_steps),
            scheduling=make_scheduling(config),
            evaluation=data.evaluation,
            metrics=make_metrics(config),
            features=features,
            is_monitored=bool(objects.callbacks),
            on_event=self.books.journal.event,
        )
        return StepModule(model, setup)
