"""One optimizer step over any number of micro-batches, inside Lightning's automatic optimisation or without it.

The scheme needs three hooks. `training_step` zeroes the gradients, runs backward for all micro-batches but the last
through the strategy (so that a gradient scaler sees them) and returns the last one's weighted loss;
`optimizer_zero_grad` does nothing, since Lightning calls it between the two; `optimizer_step` lets `retry.StepRetry`
do the step again where memory ran out. Mixed precision and clipping stay Lightning's.
`step_directly` makes the same step where none of Lightning's hooks within it is heard (see `loop`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn

from wellfed import batches, generators
from wellfed.batches import Delivery
from wellfed.contract import FEATURE_MODES, Batch, Evaluation, FeatureModeName, Features, FeatureSource
from wellfed.lit.evaluating import Evaluating
from wellfed.lit.evaluation import merge_over_ranks
from wellfed.lit.feature_table import FeatureTable
from wellfed.lit.mean_loss import MeanLoss
from wellfed.lit.ranks import RanksOfStep
from wellfed.lit.retry import StepRetry
from wellfed.lit.sharding import all_weights
from wellfed.memory import held
from wellfed.memory.checkpointing import checkpoint_blocks, is_checkpointed
from wellfed.memory.ladder import Ladder, MicroBatches, Rung
from wellfed.memory.optimizer_state import allocate
from wellfed.memory.step_start import StepStart
from wellfed.memory.thrash import Thrash
from wellfed.step.clip import are_of_one_kind, clip_by_norm
from wellfed.step.micro_batches import Loss, Preparation, Totals, log_values


class NonFiniteLoss(ArithmeticError):
    """The loss is not a finite number, and trainer.on_nan=raise."""


_PLAIN_NAMES = frozenset({"_current_fx_name", "micro_batches_done", "largest_done", "samples_done", "_is_finite"})
"""Attributes of a `StepModule` that are set in every step and never hold a parameter or a module."""


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
    on_nan: Literal["raise", "skip", "halve_lr"] = "raise"
    shares_evaluation: bool = False
    """Each rank is given some of the batches of an evaluation, which knows how to merge what ranks have seen."""

    @property
    def adapts(self) -> bool:
        """Where memory runs out, training goes on in a way that needs less."""
        return self.retry_on_oom and self.may_adapt


class StepModule(pl.LightningModule):
    """Runs a plain ``nn.Module`` that offers ``loss(batch)`` (see `wellfed.contract`)."""

    def __init__(
        self,
        model: nn.Module,
        *,
        train_data: Any,
        evaluation: Evaluation | None,
        eval_data: Mapping[str, Any],
        features: Features | None,
        feature_rows: Tensor | None = None,
        micro: MicroBatches,
        options: StepOptions,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        lr_factor: Callable[[int], float],
        on_event: Callable[..., None],
    ) -> None:
        super().__init__()
        self.model = model
        self.micro, self.options, self.totals = micro, options, Totals()
        self.ladder = Ladder(micro, self._rungs())
        self.micro_batches_done = 0
        self.largest_done = 0
        """Samples of the largest micro-batch of the latest step, on this rank."""
        self.samples_done = 0
        """Samples of the latest step on this rank, as the model counts them."""
        self.was_disturbed = False
        """The step compiled or was done again: its time is no figure."""
        self._train = Preparation(train_data, options.seed)
        self.evaluation = evaluation or MeanLoss()
        self._eval_failure: Exception | None = None
        self._evaluating = Evaluating(
            model,
            self.evaluation,
            {split: Preparation(data, options.seed) for split, data in eval_data.items()},
            may_halve=options.halve_evaluation_on_oom and options.may_adapt,
            on_event=on_event,
        )
        mode = options.feature_mode or "dynamic"
        self._features: FeatureTable | None = None
        if features is not None:
            self._features = FeatureTable(features, mode, feature_rows, may_change=options.adapts)
        self._loss = Loss(model, options.compile_mode, lambda message: on_event("compile_failed", message=message))
        self._make_optimizer, self._lr_factor, self._on_event = make_optimizer, lr_factor, on_event
        self._rng_state: dict[str, Any] | None = None
        self._is_finite: Tensor | None = None
        self._trained: list[nn.Parameter] = []
        self._world_size, self._rank = 1, 0
        self._ranks: RanksOfStep | None = None
        self._is_sharded = False
        self._delivery: Delivery | None = None
        self._part: _MicroBatch | None = None
        self._has_scaler = self._are_of_one_kind = False

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes the hook that runs before and after each of them, two dozen times a step; nn.Module would
        # look each time for a parameter, a buffer or a module of that name.
        if name in _PLAIN_NAMES:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # -- set-up ---------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> dict[str, Any]:
        """The workload's optimizer, with its schedule counted in optimizer steps."""
        optimizer = self._make_optimizer(self.model)
        # A plain function is not saved with the scheduler; an object's attributes are, and a resumed run that was
        # given more steps would get the old end of its schedule back: a rate of 0.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._lr_factor(step))  # noqa: PLW0108
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def hold_features(self) -> None:
        """Fill the feature table, once; the model is on its device and has its weights."""
        if self._features is None:
            return
        with all_weights(self.trainer.strategy):
            self._features.hold(self.model, self.device, partial(self._on_event, step=self.trainer.global_step))

    def _rungs(self) -> list[Rung]:
        """What is left with micro-batches of one sample; all of it learns the same."""

        def checkpoint_activations() -> bool:
            if self.options.compile_mode != "none" or is_checkpointed(self.model):
                return False  # a compiled step would go on without
            return checkpoint_blocks(self.model) > 0

        def move_features(mode: Any) -> bool:
            return self._features is not None and self._features.move_to(mode, self.device)

        return [
            Rung("memory.checkpoint_activations=true", checkpoint_activations),
            *(Rung(f"memory.features={mode}", partial(move_features, mode)) for mode in FEATURE_MODES[1:]),
        ]

    def on_fit_start(self) -> None:
        self.hold_features()

    def on_train_start(self) -> None:
        """The rate of the next step by this run's schedule; a checkpoint holds that of the run that wrote it."""
        self._trained = list(self.model.parameters())  # to find them takes a walk through all modules
        self._world_size, self._rank = self.trainer.world_size, self.trainer.global_rank
        self._is_sharded = isinstance(self.trainer.strategy, FSDPStrategy)
        self._ranks = None
        if self.options.retry_on_oom and isinstance(self.trainer.strategy, DDPStrategy):
            self._ranks = RanksOfStep([weight for weight in self._trained if weight.requires_grad])
        self._retry = self._make_retry()
        self._has_scaler = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        self._are_of_one_kind = are_of_one_kind(self._trained)
        for config in self.trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = rate * self._lr_factor(scheduler.last_epoch)
        for optimizer in self.trainer.optimizers:
            self._retry.optimizer_step(optimizer, partial(allocate, optimizer, self.model))

    def _make_retry(self) -> StepRetry:
        is_on_card = self.device.type == "cuda"
        self._thrash = Thrash(self.device) if is_on_card and self.options.adapts and self._world_size == 1 else None
        return StepRetry(
            self.ladder,
            StepStart(self.model, self.device) if self.options.retry_on_oom else None,
            forget=self._forget_step,
            way_out=self._way_out,
            on_event=self._on_event,
            ranks=self._ranks,
            may_adapt=self.options.may_adapt,
        )

    def on_validation_start(self) -> None:
        self.hold_features()

    def on_test_start(self) -> None:
        self.hold_features()

    def on_train_epoch_start(self) -> None:
        self._go_on_with_rng()  # what is drawn at the start of an epoch comes next
        self.totals.forget()  # the end of an epoch hands them over; a checkpoint may have been written just before

    def _go_on_with_rng(self) -> None:
        """The random state of the checkpoint that this run goes on from, once."""
        if self._rng_state is not None:
            generators.restore(self._rng_state)
            self._rng_state = None

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
            except torch.OutOfMemoryError:
                if not self.options.adapts:
                    raise
        return batch

    def weigh(self, delivery: Delivery) -> None:
        """Note what the micro-batches of a delivery will count, unless that is known; to be asked on the host."""
        if delivery.weights is None and not delivery.is_padding and self._train.has_own_weight:
            self._train.weigh(delivery, self._sizes(delivery))

    def fewer_ahead(self, ahead: int, message: str) -> None:
        """So many batches are copied to the device ahead of the step from now on; for `DevicePrefetcher`."""
        step = self.trainer.global_step + 1
        self._on_event("oom", step=step, message=message)
        self._on_event("ladder", step=step, change=f"loader.device_prefetch={ahead}")

    # -- the step -------------------------------------------------------------------------------------------------

    def training_step(self, delivery: Delivery, batch_idx: int) -> Tensor:
        if self._part is not None:
            return self._micro_loss(self._part, delivery)
        parts = self._begin_step(delivery)
        for part in parts[:-1]:
            loss = self._micro_loss(part, delivery)
            self.trainer.strategy.backward(loss, None)
            del loss
            if part.number == 0 and self._loss.overwrites:
                self._keep_gradients()
        return self._micro_loss(parts[-1], delivery)

    # Lightning reads the signature at every step, and inspect takes longer to make one than we for all our figures.
    training_step.__signature__ = inspect.signature(training_step)  # type: ignore[attr-defined]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._delivery = batch if self._is_sharded else None

    def _sharded_passes(self, last: Callable[[], Tensor]) -> Tensor:
        """Forward and backward passes of a sharded model, each micro-batch by itself.

        A forward pass gathers the weights and ends with giving them back: no backward pass may run within it.

        Args:
            last: Lightning's, of `training_step` and the backward pass.
        """
        delivery = self._delivery
        assert delivery is not None
        parts = self._begin_step(delivery)
        try:
            for self._part in parts[:-1]:
                loss = self.trainer.strategy.training_step(delivery, 0)
                self.trainer.strategy.backward(loss, None)
                del loss
            self._part = parts[-1]
            return last()
        finally:
            self._part = None

    def _begin_step(self, delivery: Delivery) -> list[_MicroBatch]:
        self._forget_step()
        parts = self._micro_batches(delivery)
        self.micro_batches_done, self.largest_done = len(parts), max(part.size for part in parts)
        self.samples_done, self._is_finite = 0, None
        return parts

    def _forget_step(self) -> None:
        """What an earlier step, or an earlier try of this one, has left."""
        self.totals.drop()
        for parameter in self._trained:
            parameter.grad = None

    def _keep_gradients(self) -> None:
        """In memory of their own; later micro-batches are added to them there."""
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _micro_batches(self, delivery: Delivery) -> list[_MicroBatch]:
        sizes = self._sizes(delivery)
        parts = self._train.split(delivery.batch, sizes)
        weights = [0] * len(parts) if delivery.is_padding else self._train.weights(delivery, parts, sizes)
        total = self._total_weight(delivery, sum(weights))
        found = zip(parts, sizes, weights, strict=True)
        return [_MicroBatch(part, number, size, weight / total) for number, (part, size, weight) in enumerate(found)]

    def _sizes(self, delivery: Delivery) -> list[int]:
        """Samples of each micro-batch; equally many micro-batches on all ranks where each is a collective."""
        if not self._is_sharded:
            return self.micro.sizes(delivery.size)
        largest_share = -(-delivery.total // self._world_size)
        return self.micro.sizes(delivery.size, num_parts=-(-largest_share // self.micro.size))

    def _micro_loss(self, part: _MicroBatch, delivery: Delivery) -> Tensor:
        place = part.number * self._world_size + self._rank
        batch = batches.to_device(part.batch, self.device)
        output = self._loss(self._train(batch, delivery, place, self._source))
        if not delivery.is_padding:
            self.samples_done += part.size if output.num_samples is None else output.num_samples
        # Ranks' gradients are averaged, so a rank's share of the step counts world_size times here.
        factor = part.share * self._world_size
        self.totals.add("loss", output.loss, factor, is_overwritten=self._loss.overwrites)
        for name, value in output.metrics.items():
            self.totals.add(name, value, factor, is_overwritten=self._loss.overwrites)
        loss = output.loss if factor == 1 else output.loss * factor  # also its backward is a kernel less
        if self.options.on_nan != "raise":
            is_finite = torch.isfinite(output.loss.detach())
            self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        return loss

    @property
    def _source(self) -> FeatureSource | None:
        return None if self._features is None else self._features.source

    def _total_weight(self, delivery: Delivery, own: int) -> float:
        """Weight of the whole step over all ranks."""
        if self._world_size == 1:
            return max(1, own)
        if not self._train.has_own_weight:
            return delivery.total
        total = torch.tensor(float(own), device=self.device)
        torch.distributed.all_reduce(total)
        return max(1.0, float(total))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Nothing: `training_step` has zeroed them, and holds the earlier micro-batches' gradients by now."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        gradients = partial(self._gradients, optimizer, optimizer_closure)
        self._step(optimizer.optimizer, partial(optimizer.step, closure=gradients))

    def step_directly(self, delivery: Delivery, batch_idx: int) -> Tensor:
        """The same step without Lightning between its parts; the loss. For `loop.StepLoop`."""
        optimizer, precision = self.trainer.optimizers[0], self.trainer.precision_plugin

        def forward_and_backward() -> Tensor:
            with precision.forward_context():
                loss = self.training_step(delivery, batch_idx)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        def closure() -> Tensor:
            with torch.enable_grad():  # an optimizer's step may run without
                loss = self._gradients(optimizer, forward_and_backward)
            self.configure_gradient_clipping(optimizer, self.trainer.gradient_clip_val)
            return loss.detach()

        loss: Tensor = self._step(optimizer, partial(optimizer.step, closure))
        return loss

    def _step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """The optimizer's step around `_gradients`, as often as it takes, and what is noted when it is done."""
        self._retry.step = self.trainer.global_step + 1
        result = self._retry.optimizer_step(optimizer, step)
        self.totals.commit()
        if self._thrash is not None and self._thrash.after_step():
            message = "the allocator had to give its cache back to the device in successive steps"
            self._on_event("thrash", step=self._retry.step, message=message)
            self._retry.go_down_without_failure()
        if self._loss.has_compiled or self._retry.has_retried:
            self._loss.has_compiled = self._retry.has_retried = False
            self.was_disturbed = True
        return result

    def _gradients(self, optimizer: Any, forward_and_backward: Callable[[], Tensor]) -> Tensor:
        """All that comes before clipping; again with smaller micro-batches where memory does not suffice."""
        self._go_on_with_rng()  # in the middle of an epoch: loaders have drawn their seeds by now
        self._retry.begin()
        if self._is_sharded:
            forward_and_backward = partial(self._sharded_passes, forward_and_backward)
        if self._ranks is not None:
            forward_and_backward = partial(self._passes_of_this_rank, forward_and_backward)
        loss = self._retry.gradients(forward_and_backward)
        if self._ranks is not None:
            self._ranks.average_gradients()
        if not self._is_step_finite():
            self._leave_out_step(optimizer)
        return loss

    def _passes_of_this_rank(self, forward_and_backward: Callable[[], Tensor]) -> Tensor:
        """Without DDP's sum of the gradients, and with its copy of rank 0's buffers."""
        ddp: Any = self.trainer.strategy.model
        ddp.require_forward_param_sync = True
        with ddp.no_sync():
            return forward_and_backward()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """By the norm, as Lightning does; that refuses a fused optimizer though there be nothing to unscale."""
        if not gradient_clip_val:
            return
        if self._is_sharded:
            self.trainer.strategy.model.clip_grad_norm_(gradient_clip_val)  # the norm over all shards
        elif self._has_scaler:
            self.trainer.precision_plugin.clip_gradients(optimizer, gradient_clip_val)
        elif self._are_of_one_kind:
            clip_by_norm(optimizer, gradient_clip_val)
        else:
            nn.utils.clip_grad_norm_(self._trained, gradient_clip_val)

    def _is_step_finite(self) -> bool:
        """Whether all losses of the step, on all ranks, are finite numbers; not asked with on_nan=raise."""
        if self._is_finite is None:
            return True
        decision = bool(self._is_finite)
        if self._world_size > 1:
            decision = self.trainer.strategy.reduce_boolean_decision(decision, all=True)
        return decision

    def _way_out(self) -> str:
        """What holds the memory, and what else can be done about it than was tried."""
        optimizer = next(iter(self.trainer.optimizers), None)
        parts = held.held_bytes(self.model, optimizer, self._source)
        less = held.overrides_with_less(
            parts, precision=self.trainer.precision_plugin.precision, batches_ahead=self.options.batches_ahead
        )
        ways = [*less, "a card with more memory (gpu=...)", "a smaller workload.model, which learns something else"]
        return f"{held.largest_parts(parts)} Next: {'; or '.join(ways)}."

    def _leave_out_step(self, optimizer: Any) -> None:
        """A step with a non-finite loss changes nothing; with halve_lr the rate goes down from here on."""
        for parameter in self._trained:
            if self._has_scaler and parameter.grad is not None:
                parameter.grad.fill_(
                    float("nan")
                )  # a scaler skips such a step by itself, and asserts without gradients
            else:
                parameter.grad = None
        self.totals.drop()
        step = self.trainer.global_step + 1
        if self.options.on_nan == "halve_lr":
            for scheduler in self.trainer.lr_scheduler_configs:
                scheduler.scheduler.base_lrs = [rate / 2 for rate in scheduler.scheduler.base_lrs]
            for group in optimizer.param_groups:
                group["lr"] /= 2
        self._on_event("nan", step=step, action=self.options.on_nan)

    @contextmanager
    def only_timed(self) -> Iterator[None]:
        """Steps within leave no event and no metric, and are not done again where memory does not suffice."""
        kept = {name: self.__dict__[name] for name in ("options", "totals", "_on_event", "was_disturbed")}
        self.options, self.totals = replace(self.options, may_adapt=False), Totals()
        self._on_event = lambda kind, **facts: None
        try:
            yield
        finally:
            self.__dict__.update(kept)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._begin_evaluation()

    def on_test_epoch_start(self) -> None:
        self._begin_evaluation()

    def _begin_evaluation(self) -> None:
        self.evaluation.reset()
        self._eval_failure = None

    def validation_step(self, delivery: Delivery, batch_idx: int) -> None:
        self._evaluate("val", delivery)

    def test_step(self, delivery: Delivery, batch_idx: int) -> None:
        self._evaluate("test", delivery)

    def _evaluate(self, split: str, delivery: Delivery) -> None:
        if delivery.is_padding:
            self._eval_failure = delivery.failure
        else:
            self._evaluating.take(split, delivery, self._source, self.device, self.trainer.global_step)

    def evaluated(self) -> dict[str, float]:
        """The metrics of the pass that has just ended."""
        if self.options.shares_evaluation:
            merge_over_ranks(self.evaluation, self._eval_failure)
        return log_values(self.evaluation.compute())

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = generators.state()
        checkpoint["micro_batch"] = self.micro.size
        if self._world_size == 1:
            checkpoint["totals"] = self.totals.state_dict()
        loader = self.trainer.train_dataloader
        if hasattr(loader, "state_dict"):
            checkpoint["position"] = loader.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng_state = checkpoint.get("rng")
        if self._world_size == 1 and "totals" in checkpoint:
            self.totals.load_state_dict(checkpoint["totals"])


@dataclass
class _MicroBatch:
    """A part of a step's samples that is computed at a time."""

    batch: Batch
    number: int
    """From 0."""
    size: int
    share: float
    """What it counts of the whole step over all ranks."""
