"""One optimizer step over any number of micro-batches, inside Lightning's automatic optimisation or without it.

The scheme needs three hooks. `training_step` zeroes the gradients, runs backward for all micro-batches but the last
through the strategy (so that a gradient scaler sees them) and returns the last one's weighted loss;
`optimizer_zero_grad` does nothing, since Lightning calls it between the two; `optimizer_step` catches an
out-of-memory error around the closure, which may be called again. Mixed precision and clipping stay Lightning's.
`step_directly` makes the same step where none of Lightning's hooks within it is heard (see `loop`).
"""

from __future__ import annotations

import gc
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from wellfed.contract import Batch, Evaluation, Features, FeatureSource
from wellfed.errors import OutOfMemoryExhausted
from wellfed.lit.clip import are_of_one_kind, clip_by_norm
from wellfed.lit.evaluation import merge_over_ranks
from wellfed.lit.step import Loss, Preparation, Totals, log_values
from wellfed.loading import batches
from wellfed.loading.build import Delivery
from wellfed.memory import features as feature_room
from wellfed.memory import oom
from wellfed.memory.ladder import MicroBatches


class NonFiniteLoss(ArithmeticError):
    """The loss is not a finite number, and trainer.on_nan=raise."""


_PLAIN_NAMES = frozenset({"_current_fx_name", "micro_batches_done", "samples_done", "_is_finite"})
"""Attributes of a `StepModule` that are set in every step and never hold a parameter or a module."""


@dataclass(frozen=True)
class StepOptions:
    """How a step is done; every field is decided."""

    seed: int
    feature_mode: Literal["cache", "cache_host", "dynamic"] | None = None
    compile_mode: str = "none"
    retry_on_oom: bool = True
    on_nan: Literal["raise", "skip", "halve_lr"] = "raise"
    shares_evaluation: bool = False
    """Each rank is given some of the batches of an evaluation, which knows how to merge what ranks have seen."""


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
        self.micro_batches_done = 0
        self.samples_done = 0
        """Samples of the latest step on this rank, as the model counts them."""
        self.was_disturbed = False
        """The step compiled or was done again: its time is no figure."""
        self._train = Preparation(train_data, options.seed)
        self._eval = {split: Preparation(data, options.seed) for split, data in eval_data.items()}
        self.evaluation = evaluation or MeanLoss()
        self._eval_failure: Exception | None = None
        self._features, self._feature_rows = features, feature_rows
        self._source: FeatureSource | None = None if features is None else _NotHeld()
        self._loss = Loss(model, options.compile_mode, lambda message: on_event("compile_failed", message=message))
        self._make_optimizer, self._lr_factor, self._on_event = make_optimizer, lr_factor, on_event
        self._rng_state: dict[str, Any] | None = None
        self._is_finite: Tensor | None = None
        self._trained: list[nn.Parameter] = []
        self._world_size, self._rank = 1, 0
        self._has_scaler = self._clips_itself = False

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
        if self._features is not None and isinstance(self._source, _NotHeld):
            was_training = self.model.training
            self.model.eval()
            mode = self.options.feature_mode or "dynamic"
            known = self._feature_rows if self.device.type == "cpu" else None
            self._source = feature_room.hold(self._features, mode, self.device, known)
            self.model.train(was_training)

    def on_fit_start(self) -> None:
        self.hold_features()

    def on_train_start(self) -> None:
        """The rate of the next step by this run's schedule; a checkpoint holds that of the run that wrote it."""
        self._trained = list(self.model.parameters())  # to find them takes a walk through all modules
        self._world_size, self._rank = self.trainer.world_size, self.trainer.global_rank
        self._has_scaler = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        # Lightning's plugins know of shards, and refuse to clip what a fused optimizer has yet to unscale.
        is_plain = type(self.trainer.strategy) is SingleDeviceStrategy and not self._has_scaler
        self._clips_itself = is_plain and are_of_one_kind(self._trained)
        for config in self.trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = rate * self._lr_factor(scheduler.last_epoch)

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
            _restore_rng(self._rng_state)
            self._rng_state = None

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Our own walk over the batch: Lightning's copies a dataclass deeply before it moves it."""
        if isinstance(batch, Delivery) and not batch.is_on_device and device.type != "cpu":
            batch.batch = batches.to_device(batch.batch, device)
        return batch

    # -- the step -------------------------------------------------------------------------------------------------

    def training_step(self, delivery: Delivery, batch_idx: int) -> Tensor:
        self._forget_gradients()
        parts = self._train.split(delivery.batch, self.micro.sizes(delivery.size))
        weights = [0 if delivery.is_padding else self._train.weight(part, delivery) for part in parts]
        total = self._total_weight(delivery, sum(weights))
        self.micro_batches_done, self.samples_done, self._is_finite = len(parts), 0, None
        for number, (part, weight) in enumerate(zip(parts[:-1], weights[:-1], strict=True)):
            loss = self._micro_loss(part, delivery, number, weight / total)
            self.trainer.strategy.backward(loss, None)
            del loss
        return self._micro_loss(parts[-1], delivery, len(parts) - 1, weights[-1] / total)

    # Lightning reads the signature at every step, and inspect takes longer to make one than we for all our figures.
    training_step.__signature__ = inspect.signature(training_step)  # type: ignore[attr-defined]

    def _forget_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def _micro_loss(self, part: Batch, delivery: Delivery, number: int, share: float) -> Tensor:
        place = number * self._world_size + self._rank
        output = self._loss(self._train(part, delivery, place, self._source))
        if not delivery.is_padding:
            self.samples_done += delivery.size_of(part) if output.num_samples is None else output.num_samples
        # Ranks' gradients are averaged, so a rank's share of the step counts world_size times here.
        factor = share * self._world_size
        self.totals.add("loss", output.loss, factor)
        for name, value in output.metrics.items():
            self.totals.add(name, value, factor)
        loss = output.loss if factor == 1 else output.loss * factor  # also its backward is a kernel less
        if self.options.on_nan != "raise":
            is_finite = torch.isfinite(output.loss.detach())
            self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        return loss

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
        optimizer.step(closure=partial(self._gradients, optimizer, optimizer_closure))
        self._note_compile()

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

        loss: Tensor = optimizer.step(closure)
        self._note_compile()
        return loss

    def _gradients(self, optimizer: Any, forward_and_backward: Callable[[], Tensor]) -> Tensor:
        """All that comes before clipping; again with smaller micro-batches where memory does not suffice."""
        self._go_on_with_rng()  # in the middle of an epoch: loaders have drawn their seeds by now
        rng = _torch_rng() if self.options.retry_on_oom else None
        while True:
            failure: oom.MemoryFailure | None = None
            try:
                loss = forward_and_backward()
            except Exception as error:
                failure = oom.classify(error)
                if failure is None:
                    raise
            if failure is None:
                break
            # Outside the handler: its traceback would keep the failed step's tensors alive.
            self._step_down(failure, rng)
        if self._is_step_finite():
            self.totals.commit()
        else:
            self._leave_out_step(optimizer)
        return loss

    def _note_compile(self) -> None:
        if self._loss.has_compiled:
            self._loss.has_compiled, self.was_disturbed = False, True

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """By the norm, as Lightning does after checks of two strings at every step."""
        if gradient_clip_val is None:
            return
        if self._clips_itself and gradient_clip_val > 0:
            clip_by_norm(optimizer, gradient_clip_val)
        else:
            self.trainer.precision_plugin.clip_gradients(optimizer, gradient_clip_val)

    def _is_step_finite(self) -> bool:
        """Whether all losses of the step, on all ranks, are finite numbers; not asked with on_nan=raise."""
        if self._is_finite is None:
            return True
        decision = bool(self._is_finite)
        if self._world_size > 1:
            decision = self.trainer.strategy.reduce_boolean_decision(decision, all=True)
        return decision

    def _step_down(self, failure: oom.MemoryFailure, rng: dict[str, Any] | None) -> None:
        """Free what the failed step held and go on with smaller micro-batches."""
        self.totals.drop()
        self._forget_gradients()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        step, before = self.trainer.global_step + 1, self.micro.size
        self._on_event(failure.kind.removeprefix("device_").removeprefix("host_"), step=step, message=failure.message)
        smaller = self.micro.step_down() if rng is not None else None
        if smaller is None or rng is None:
            tried = " -> ".join(map(str, self.micro.tried))
            raise OutOfMemoryExhausted(
                f"Out of memory with micro-batches of {tried}: {failure.message} "
                "Next: a smaller workload.model, memory.features=dynamic, or a card with more memory (gpu=...)."
            )
        self._on_event("step_down", step=step, micro_batch=smaller, before=before)
        _restore_torch_rng(rng)
        self.was_disturbed = True

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
        self.options, self.totals = replace(self.options, retry_on_oom=False), Totals()
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
            return
        batch = self._eval[split](delivery.batch, delivery, 0, self._source)
        if self._source is None:
            self.evaluation.update(self.model, batch)
        else:
            self.evaluation.update(self.model, batch, self._source)

    def evaluated(self) -> dict[str, float]:
        """The metrics of the pass that has just ended."""
        if self.options.shares_evaluation:
            merge_over_ranks(self.evaluation, self._eval_failure)
        return log_values(self.evaluation.compute())

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = _rng_state()
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


class MeanLoss:
    """The evaluation of a workload that brings none: the mean loss over the split."""

    best_metric = "loss"
    best_mode: Literal["max", "min"] = "min"

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._sum: Tensor | None = None
        self._weight = 0

    def update(self, model: nn.Module, batch: Batch, /, *features: FeatureSource) -> None:
        """Add a batch's loss, weighted by its size."""
        weight = batches.batch_size(batch)
        loss = model.loss(batch).loss.detach().double() * weight  # type: ignore[operator]
        self._sum = loss if self._sum is None else self._sum + loss
        self._weight += weight

    def compute(self) -> dict[str, float]:
        """``loss``."""
        return {} if self._sum is None else {"loss": float(self._sum) / self._weight}

    def state(self) -> tuple[Tensor | None, int]:
        """Sum of losses and of weights."""
        return self._sum, self._weight

    def merge(self, states: Sequence[tuple[Tensor | None, int]]) -> None:
        """Those of all ranks."""
        sums = [own for own, _ in states if own is not None]
        self._sum = torch.stack(sums).sum() if sums else None
        self._weight = sum(weight for _, weight in states)

    def artifacts(self, folder: Any) -> dict[str, Any]:
        """None."""
        return {}


class _NotHeld:
    """Stands for features until the model is on its device."""

    def rows(self, indices: Tensor) -> Tensor:
        raise RuntimeError("features are asked for before training or evaluation has started")


def _rng_state() -> dict[str, Any]:
    """All generators as tensors and ints, which a weights-only load accepts."""
    name, keys, place, has_gauss, gauss = np.random.get_state()
    version, numbers, gauss_next = random.getstate()
    return {
        **_torch_rng(),
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(place),
            int(has_gauss),
            float(gauss),
        ],
        "python": [version, list(numbers), gauss_next],
    }


def _restore_rng(state: dict[str, Any]) -> None:
    _restore_torch_rng(state)
    name, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), place, has_gauss, gauss))
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers), gauss_next))


def _torch_rng() -> dict[str, Any]:
    """torch's own generators: all that a step done again needs."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def _restore_torch_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([tensor.cpu() for tensor in state["cuda"]])
