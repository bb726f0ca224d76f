"""Hangs training and evaluation of a plain model on the hooks of Lightning's loops."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.contract import FEATURE_MODES, Evaluation, FeatureModeName, Features, FeatureSource
from wellfed.errors import WellfedError
from wellfed.record import OnEvent
from wellfed.sample_rng import seed_from
from wellfed.train.lightning.evaluating import Evaluating, merge_over_ranks
from wellfed.train.lightning.in_step import IN_STEP, CallbacksInStep, hooks_of
from wellfed.train.lightning.scheduling import Scheduling
from wellfed.train.lightning.sharding import all_weights
from wellfed.train.lightning.split_metrics import SplitMetrics
from wellfed.train.memory import oom
from wellfed.train.memory.checkpointing import checkpoint_blocks, is_checkpointed
from wellfed.train.memory.fallbacks import Fallback, Fallbacks, MicroBatches
from wellfed.train.step.compiled import Loss
from wellfed.train.step.feature_table import FeatureStage, FeatureTable
from wellfed.train.step.micro_batches import Preparation
from wellfed.train.step.non_finite import OnNan, as_scheduled, rate_factor
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import AgreeingReplicas, Ranks, Replicas, Shards
from wellfed.train.step.totals import Totals
from wellfed.train.step.train_step import Computation, StepListener, StepSettings, TrainStep
from wellfed.units import gib

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOptions:
    """How a step is done; every field is decided."""

    seed: int
    feature_mode: FeatureModeName | None = None
    compile_mode: str = "none"
    retry_on_oom: bool = True
    halve_evaluation_on_oom: bool = True
    may_adapt: bool = True
    """False: where memory runs out the run ends, though all is prepared for doing a step again."""
    batches_ahead: int = 0
    """Batches that are copied to the device ahead of the step, for what is said of memory."""
    on_nan: OnNan = "raise"
    shares_evaluation: bool = False
    """Each rank is given some of the batches of an evaluation, which knows how to merge what ranks have seen."""

    @property
    def adapts(self) -> bool:
        """Where memory runs out, training goes on in a way that needs less."""
        return self.retry_on_oom and self.may_adapt

    @property
    def halves_evaluation(self) -> bool:
        """Where memory runs out, an evaluation goes on with parts of its batches."""
        return self.halve_evaluation_on_oom and self.may_adapt


class StepModule(pl.LightningModule):
    """Trains a plain ``nn.Module`` that offers ``loss(batch)`` (see `wellfed.contract`) by `step.train_step.TrainStep`.

    The whole step is done in ``optimizer_step``, or by `loop.StepLoop`; Lightning's own closure is never called.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        train_data: Any,
        evaluation: Evaluation | Any | None,
        metrics: Any = None,
        eval_data: Mapping[str, Any],
        features: Features | None,
        feature_rows: Tensor | None = None,
        encoder: Sequence[nn.Parameter] = (),
        micro: MicroBatches,
        options: StepOptions,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        lr_factor: Callable[[int], float],
        scheduling: Scheduling | None = None,
        is_monitored: bool = False,
        on_event: OnEvent,
    ) -> None:
        """``scheduling`` stands in the place of ``lr_factor``; ``is_monitored``: callbacks may go by validations;
        ``encoder``: weights behind the features that are frozen until a stage trains them (`begin_stage`)."""
        super().__init__()
        self.model = model
        self.micro, self.options, self.totals = micro, options, Totals()
        self._fallbacks = Fallbacks(micro, self._rungs())
        self._prepare = Preparation(train_data, options.seed, model)
        self.evaluation = SplitMetrics(model, evaluation, metrics)
        self._eval_failure: Exception | None = None
        self._evaluating = Evaluating(
            model,
            self.evaluation,
            self._preparations(eval_data),
            may_halve=options.halves_evaluation,
            on_event=on_event,
        )
        self._features: FeatureTable | None = None
        if features is not None:
            mode = options.feature_mode or "dynamic"
            self._features = FeatureTable(
                features, mode, feature_rows, may_change=options.adapts, awaits_training=bool(encoder)
            )
        self._encoder = tuple(encoder)
        self._loss = Loss(model, options.compile_mode, lambda message: on_event("compile_failed", message=message))
        self._make_optimizer, self._lr_factor, self._on_event = make_optimizer, lr_factor, on_event
        self.scheduling = scheduling
        self.is_monitored = is_monitored or scheduling is not None
        """Callbacks or a scheduler may go by the figures of its validations."""
        self.listener: StepListener | None = None
        """Callbacks that hear what goes on within a step of the training that goes on."""
        self.step: TrainStep | None = None
        """Of the training that goes on."""
        self._delivery: Delivery | None = None
        self._lowered: Mapping[str, int] = {}
        """Micro-batch that the checkpoint's run had planned, and the smaller one that it went on with."""

    def __deepcopy__(self, memo: dict[int, Any]) -> pl.LightningModule:
        """The weights, under their names: what is kept of a model as an average. Data and journal are not copied."""
        weights = pl.LightningModule()
        weights.model = copy.deepcopy(self.model, memo)
        return weights

    def _rungs(self) -> list[Fallback]:
        """What is left with micro-batches of one sample; all of it learns the same."""

        def checkpoint_activations() -> bool:
            if self.options.compile_mode != "none" or is_checkpointed(self.model):
                return False  # a compiled step would go on without
            return checkpoint_blocks(self.model) > 0

        def move_features(mode: Any) -> bool:
            return self._features is not None and self._features.move_to(mode, self.device)

        return [
            Fallback("memory.checkpoint_activations=true", checkpoint_activations),
            *(
                Fallback(f"memory.features={mode}", partial(move_features, mode), frees_held=True)
                for mode in FEATURE_MODES[1:]
            ),
        ]

    # -- set-up ---------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> dict[str, Any]:
        """The workload's optimizer, with its schedule counted in optimizer steps."""
        frozen = [weight for weight in self._encoder if not weight.requires_grad]
        # It has its place in the optimizer from the start, so that schedules and checkpoints know of it; as long as it
        # has no gradient it has no state either.
        for weight in frozen:
            weight.requires_grad_(True)
        optimizer = self._make_optimizer(self.model)
        for weight in frozen:
            weight.requires_grad_(False)
        if self.scheduling is not None:
            return {"optimizer": optimizer, "lr_scheduler": self.scheduling.of(optimizer)}
        # A plain function is not saved with the scheduler; an object's attributes are, and a resumed run that was
        # given more steps would get the old end of its schedule back: a rate of 0.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._lr_factor(step))  # noqa: PLW0108
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        self._hold_features()
        trainer = self.trainer
        is_heard = any(hooks_of(callback, IN_STEP) for callback in trainer.callbacks)
        self.listener = CallbacksInStep(trainer, self) if is_heard else None
        if self._lowered.get("planned") == self.micro.size and self.micro.go_on_with(self._lowered["size"]):
            _LOG.warning(
                "Going on with micro-batches of %d: the run that wrote the checkpoint ran out of memory with more.",
                self.micro.size,
            )
        self.step = self._make_step()

    def _make_step(self) -> TrainStep:
        trainer, options = self.trainer, self.options
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        precision = Precision(trainer.precision_plugin.precision, self.device.type, scaler)
        return TrainStep(
            Computation(
                self.model,
                self._loss,
                self._prepare,
                precision,
                self.device,
                ranks=self._ranks(),
                features=self._source,
            ),
            trainer.optimizers[0],
            self._fallbacks,
            StepSettings(
                gradient_clip=trainer.gradient_clip_val,
                on_nan=options.on_nan,
                on_oom="retry" if options.retry_on_oom else "fail",
                may_adapt=options.may_adapt,
                batches_ahead=options.batches_ahead,
            ),
            totals=self.totals,
            listener=self.listener,
            on_event=self._on_event,
        )

    def _ranks(self) -> Ranks:
        strategy = self.trainer.strategy
        if isinstance(strategy, FSDPStrategy):
            return Shards(strategy.model, self.device)
        if not isinstance(strategy, DDPStrategy):
            return Ranks()
        if not self.options.retry_on_oom:
            return Replicas(strategy.model, self.device)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        return AgreeingReplicas(strategy.model, self.device, weights)

    def forward(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """``call(*arguments)``: a part of the step that is done within what a strategy has put around the module."""
        return call(*arguments)

    def on_train_start(self) -> None:
        """The rate of the next step by this run's schedule; a checkpoint holds that of the run that wrote it."""
        assert self.step is not None
        if (rank := self.trainer.global_rank) and isinstance(self.trainer.strategy, DDPStrategy):
            # With the seed of rank 0 all would drop out alike. Shards of a model do: they must run the same blocks.
            generators.seed_all(seed_from(self.options.seed, rank))
        for config in self.trainer.lr_scheduler_configs if self.scheduling is None else ():
            scheduler = config.scheduler
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = rate * self._lr_factor(scheduler.last_epoch) * rate_factor(group)
        self.step.number = self.trainer.global_step
        self.step.allocate_state()

    def on_fit_end(self) -> None:
        self.step = self.listener = None  # and with it the optimizer's state

    def on_validation_start(self) -> None:
        self._hold_features()

    on_test_start = on_validation_start

    def _hold_features(self) -> None:
        """Fill the feature table, once; the model is on its device and has its weights."""
        if self._features is not None:
            with all_weights(self.trainer.strategy):
                self._features.hold(self.model, self.device, partial(self._on_event, step=self.trainer.global_step))

    def begin_stage(self, stage: FeatureStage, train_data: Any, eval_data: Mapping[str, Any]) -> dict[str, Any]:
        """From here on features are held as the stage has it; the facts of it for the record.

        The data are those whose batches carry what is lacking then. To be called between two epochs, or before
        training. Device memory is that of torch's tensors before the change, and after it without what an encoder that
        is trained from here on adds.
        """
        was_training, self.step, before_gib = self.step is not None, None, self._allocated_gib()
        self._prepare = Preparation(train_data, self.options.seed, self.model)
        self._evaluating.splits = self._preparations(eval_data)
        if self._features is not None:
            self._features.begin(stage, self.device)
        self.micro = stage.micro
        self._fallbacks = Fallbacks(self.micro, self._rungs())
        oom.release()
        after_gib = self._allocated_gib()
        joined = [weight for weight in self._encoder if stage.trains_encoder and not weight.requires_grad]
        for weight in joined:
            weight.requires_grad_(True)
        if stage.checkpoints:
            checkpoint_blocks(self.model)
        if was_training:
            self._begin_steps(has_more_weights=bool(joined))
        return {
            "features": stage.mode if self._features is None else self._features.mode,
            "micro_batch": stage.micro.size,
            "device_gib_before": before_gib,
            "device_gib_after": after_gib,
            "joined": sum(weight.numel() for weight in joined),
        }

    def _begin_steps(self, *, has_more_weights: bool) -> None:
        """Steps of what is trained by now, in the middle of training."""
        strategy = self.trainer.strategy
        if has_more_weights and isinstance(strategy, DDPStrategy):
            strategy.model = strategy._setup_model(self)  # it sums what needed a gradient when it was made
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # it has sent the weights around on a stream of its own
        self.step = self._make_step()
        self.step.number = self.trainer.global_step
        self.step.allocate_state()

    def _allocated_gib(self) -> float | None:
        """None on the CPU."""
        return gib(torch.cuda.memory_allocated(self.device)) if self.device.type == "cuda" else None

    def _preparations(self, splits: Mapping[str, Any]) -> dict[str, Preparation]:
        return {split: Preparation(data, self.options.seed, self.model) for split, data in splits.items()}

    def _source(self) -> FeatureSource | None:
        return None if self._features is None else self._features.source

    # -- batches --------------------------------------------------------------------------------------------------

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Our own walk over the batch: Lightning's copies a dataclass deeply before it moves it.

        Where the whole batch does not fit it stays on the host, and is moved in parts.
        """
        if not isinstance(batch, Delivery):
            return batch
        if self.trainer.training:
            self.weigh(batch)
        if not batch.is_on_device and device.type != "cpu":
            try:
                batch.batch = batches.to_device(batch.batch, device)
            except Exception as error:
                if not self.goes_on(self.trainer.training) or oom.classify(error) is None:
                    raise
        return batch

    def weigh(self, delivery: Delivery) -> None:
        """Note what the micro-batches of a delivery will count, unless that is known; to be asked on the host."""
        if self.step is not None:
            self.step.weigh(delivery)

    def goes_on(self, is_training: bool) -> bool:
        """Whether training, or an evaluation, adapts where memory runs out."""
        return self.options.adapts if is_training else self.options.halves_evaluation

    def fewer_ahead(self, ahead: int, message: str) -> None:
        """So many batches are copied to the device ahead of the step from now on; for `DevicePrefetcher`."""
        step = self.trainer.global_step + 1
        self._on_event("oom", step=step, message=message)
        self._on_event("ladder", step=step, change=f"loader.device_prefetch={ahead}")

    # -- training -------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        self.totals.forget()  # the end of an epoch hands them over; a checkpoint may have been written just before

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._delivery = batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        delivery, self._delivery = self._delivery, None
        assert delivery is not None
        assert self.step is not None
        # What a call of it would leave: a count of zeroed gradients, of which callbacks hear, and a result.
        optimizer_closure._zero_grad_fn()
        optimizer_closure._result = ClosureResult(self.step(delivery))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Nothing: it is a part of the step."""

    def training_step(self, delivery: Delivery, batch_idx: int) -> Tensor:
        raise NotImplementedError("the step is done in optimizer_step; Lightning wants this method to be there")

    @contextmanager
    def only_timed(self) -> Iterator[None]:
        """A training within leaves no event and no metric, and is not adapted where memory does not suffice."""
        kept = {name: self.__dict__[name] for name in ("options", "totals", "_on_event")}
        self.options, self.totals = replace(self.options, may_adapt=False), Totals()
        self._on_event = lambda kind, **facts: None
        try:
            with self.unscheduled():
                yield
        finally:
            self.__dict__.update(kept)

    @contextmanager
    def unscheduled(self) -> Iterator[None]:
        """A training within has no epochs and no validations that a scheduler of the user's could go by."""
        kept, self.scheduling = self.scheduling, None
        try:
            yield
        finally:
            self.scheduling = kept

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        try:
            with as_scheduled(scheduler.optimizer):
                super().lr_scheduler_step(scheduler, metric)
        except ValueError as error:  # a cycle is over, and training is not
            raise WellfedError(f"workload.schedule ({type(scheduler).__name__}): {error}") from error

    # -- evaluation -----------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self.evaluation.reset()
        self._eval_failure = None

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, delivery: Delivery, batch_idx: int) -> None:
        self._evaluate("val", delivery)

    def test_step(self, delivery: Delivery, batch_idx: int) -> None:
        self._evaluate("test", delivery)

    def _evaluate(self, split: str, delivery: Delivery) -> None:
        if delivery.is_padding:
            self._eval_failure = delivery.failure
        else:
            self._evaluating.take(split, delivery, self._source(), self.device, self.trainer.global_step)

    def evaluated(self) -> dict[str, float]:
        """The metrics of the pass that has just ended."""
        if self.options.shares_evaluation:
            merge_over_ranks(self.evaluation, self._eval_failure)
        return self.evaluation.compute()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if len(self.micro.tried) > 1:  # gradients summed over other parts are not the same bit for bit
            checkpoint["micro_batch"] = {"planned": self.micro.tried[0], "size": self.micro.size}
        if self.trainer.world_size == 1:
            checkpoint["totals"] = self.totals.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._lowered = checkpoint.get("micro_batch", {})
        if self.trainer.world_size == 1 and "totals" in checkpoint:
            self.totals.load_state_dict(checkpoint["totals"])
