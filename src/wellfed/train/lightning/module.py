"""Trains and evaluates a plain model in the hooks of Lightning's loops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.errors import WellfedError
from wellfed.observe.timing.step_clock import StepClock
from wellfed.sample_rng import seed_from
from wellfed.train.lightning.hooks import IN_STEP, callbacks_in_step, hooks_of
from wellfed.train.lightning.sharding import all_weights
from wellfed.train.memory import oom
from wellfed.train.plain_model.plain_training import PlainSetup, PlainTraining
from wellfed.train.plain_model.scheduling import FactorLR
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import AgreeingReplicas, Ranks, Replicas, Shards
from wellfed.train.step.step_passes import StepListener
from wellfed.train.step.train_step import TrainStep


class StepModule(pl.LightningModule):
    """A plain ``nn.Module`` for a Trainer, trained by `step.train_step.TrainStep`.

    The whole step runs in ``optimizer_step``, or in `loop.StepLoop`. Lightning's own closure is never called.
    """

    def __init__(self, model: nn.Module, setup: PlainSetup) -> None:
        super().__init__()
        self.model, self.plain = model, PlainTraining(model, setup)
        self.step: TrainStep | None = None
        """Step of the current training."""
        self.clock: StepClock | None = None
        """Clock that times the phases of its steps."""
        self.listener: StepListener | None = None
        """Callbacks with hooks inside a step of the current training."""
        self._delivery: Delivery | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> pl.LightningModule:
        """Returns a module with the same weights by name and nothing else, for `WeightAveraging`."""
        weights = pl.LightningModule()
        weights.model = copy.deepcopy(self.model, memo)
        return weights

    def forward(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``call(*arguments)``, called inside the strategy's wrapper of the module."""
        return call(*arguments)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer, plain = self.plain.make_optimizer(self.model), self.plain
        if plain.scheduling is not None:
            return {"optimizer": optimizer, "lr_scheduler": plain.scheduling.of(optimizer)}
        # A lambda is not saved with the scheduler. An object's attributes would be saved. A resumed run with more steps
        # would then get the old end of its schedule: a rate of 0.
        scheduler = FactorLR(optimizer, lambda step: plain.lr_factor(step))  # noqa: PLW0108
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # -- training -------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        self._hold_features()
        has_listeners = any(hooks_of(callback, IN_STEP) for callback in self.trainer.callbacks)
        self.listener = callbacks_in_step(self.trainer, self) if has_listeners else None
        self.plain.resume_lowered()
        self.step = self._make_step()

    def _make_step(self) -> TrainStep:
        trainer = self.trainer
        plugin: Any = trainer.precision_plugin
        precision = Precision(plugin.precision, self.device.type, getattr(plugin, "scaler", None))
        optimizer, clip = trainer.optimizers[0], trainer.gradient_clip_val
        step = self.plain.make_step(optimizer, precision, self.device, self._ranks(), clip, self.listener)
        if self.clock is not None:
            step.passes.mark, step.passes.now_s = self.clock.mark, self.clock.now_s
        return step

    def _ranks(self) -> Ranks:
        strategy = self.trainer.strategy
        if isinstance(strategy, FSDPStrategy):
            return Shards(strategy.model, self.device)
        if not isinstance(strategy, DDPStrategy):
            return Ranks()
        if self.plain.options.on_oom != "retry":
            return Replicas(strategy.model, self.device)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        return AgreeingReplicas(strategy.model, self.device, weights)

    @property
    def seeds_ranks(self) -> bool:
        """Whether each rank draws from a seed of its own, so that dropout masks differ. Ranks of sharded models draw
        alike: they share blocks."""
        return isinstance(self.trainer.strategy, DDPStrategy)

    def on_train_start(self) -> None:
        assert self.step is not None
        if (rank := self.trainer.global_rank) and self.seeds_ranks:
            generators.seed_all(seed_from(self.plain.options.seed, rank, self.trainer.global_step))
        for optimizer in self.trainer.optimizers:
            if optimizer.defaults.get("foreach") is False:  # a restart's change, which the checkpoint does not have
                for group in optimizer.param_groups:
                    group["foreach"] = False
        # A checkpoint has the rate of the schedule of its own run.
        for config in self.trainer.lr_scheduler_configs if self.plain.scheduling is None else ():
            scheduler = config.scheduler
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = rate * self.plain.lr_factor(scheduler.last_epoch)
        self.step.number = self.trainer.global_step

    def on_fit_end(self) -> None:
        self.step = self.listener = None  # frees the optimizer's state

    def on_train_epoch_start(self) -> None:
        self.plain.totals.forget()  # written at the end of the epoch; a checkpoint may have old ones

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._delivery = batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        delivery, self._delivery = self._delivery, None
        assert delivery is not None
        assert self.step is not None
        # The closure would leave a count of zeroed gradients, for callbacks, and a result.
        optimizer_closure._zero_grad_fn()
        optimizer_closure._result = ClosureResult(self.step(delivery))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Does nothing, since the step deletes gradients."""

    def training_step(self, delivery: Delivery, batch_idx: int) -> Tensor:
        raise NotImplementedError("the step is done in optimizer_step; Lightning wants this method to be there")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if isinstance(scheduler, FactorLR):
            scheduler.step()
            return
        try:
            super().lr_scheduler_step(scheduler, metric)
        except ValueError as error:  # a cycle ends before training does
            raise WellfedError(f"workload.schedule ({type(scheduler).__name__}): {error}") from error

    def _hold_features(self) -> None:
        has_features = self.plain.source() is not None
        with all_weights(self.trainer.strategy) if has_features else nullcontext():
            self.plain.hold_features(self.device, self.trainer.global_step)

    # -- batches --------------------------------------------------------------------------------------------------

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch. One that does not fit stays on the host and is moved in micro-batches.

        Lightning's own method would first make a deep copy of a dataclass.
        """
        if not isinstance(batch, Delivery):
            return batch
        is_training = self.trainer.training
        if is_training:
            self.weigh(batch)
        if not batch.is_on_device and device.type != "cpu":
            try:
                batch.batch = batches.to_device(batch.batch, device)
            except Exception as error:
                if not self.plain.options.goes_on(is_training=is_training) or oom.classify(error) is None:
                    raise
        return batch

    def weigh(self, delivery: Delivery) -> None:
        """Computes the weights of the micro-batches, unless they are known. The batch must be on the host."""
        if self.step is not None:
            self.step.passes.weigh(delivery)

    # -- evaluation and checkpoints -------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self._hold_features()

    on_test_start = on_validation_start

    def on_validation_epoch_start(self) -> None:
        self.plain.evaluating.begin()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, delivery: Delivery, batch_idx: int) -> None:
        self._evaluate("val", delivery)

    def test_step(self, delivery: Delivery, batch_idx: int) -> None:
        self._evaluate("test", delivery)

    def _evaluate(self, split: str, delivery: Delivery) -> None:
        self.plain.evaluating.take(split, delivery, self.plain.source(), self.device, self.trainer.global_step)

    def end_evaluation(self, split: Literal["val", "test"]) -> dict[str, float]:
        """Returns the metrics of a split. If memory ran out, first repeats the pass over it in smaller batches."""
        evaluating = self.plain.evaluating
        loader = self.trainer.val_dataloaders if split == "val" else self.trainer.test_dataloaders
        while evaluating.must_repeat:
            self.evaluate_again(split, loader)
        return evaluating.end()

    def evaluate_again(self, split: str, deliveries: Iterable[Delivery]) -> None:
        """Begins the pass over a split again, in the run's precision, as Lightning's loop makes it."""
        strategy = self.trainer.strategy
        step = strategy.validation_step if split == "val" else strategy.test_step
        self.plain.evaluating.begin()
        for number, delivery in enumerate(deliveries):
            step(self.trainer.precision_plugin.convert_input(delivery), number)

    @property
    def mean_of_ranks(self) -> Callable[[Tensor], Tensor] | None:
        """A function that returns the mean of a tensor over all ranks; None with one rank."""
        strategy = self.trainer.strategy
        # Sums of a checkpoint lie on the CPU, where NCCL can't reduce them.
        return None if self.trainer.world_size == 1 else lambda sums: strategy.reduce(sums.to(strategy.root_device))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.plain.save_to(checkpoint, self.mean_of_ranks)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.plain.load_from(checkpoint)
