"""Makes the optimizer step that training, `fit`, the probe before training and the rehearsal all run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellfed import batches
from wellfed.batches import Delivery
from wellfed.contract import FeatureSource
from wellfed.errors import ModelError
from wellfed.record import OnEvent, ignore_event
from wellfed.train.memory import breakdown, oom
from wellfed.train.memory.less_memory import Fallbacks
from wellfed.train.memory.optimizer_state import allocate
from wellfed.train.memory.step_start import StepStart
from wellfed.train.memory.thrash import Thrash
from wellfed.train.step.compiled import Loss
from wellfed.train.step.loss_faults import add_place
from wellfed.train.step.micro_batches import MicroBatch, Preparation
from wellfed.train.step.non_finite import OnNan, all_finite, halve_rate
from wellfed.train.step.precision import Precision
from wellfed.train.step.replicas import Ranks
from wellfed.train.step.retry import StepRetry
from wellfed.train.step.totals import Totals


class StepListener:
    """Hooks within a step, which may change gradients; these do nothing."""

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss of a micro-batch, weighted by its share, before its backward pass."""

    def after_backward(self) -> None:
        """Called after the backward pass of a micro-batch; with a scaler its gradients are scaled."""

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when all gradients are there, in their true size and not yet clipped."""


class _NoWeight(Exception):
    """The samples of the step have no weight on any rank: nothing is masked, or all is padding."""


@dataclass(frozen=True)
class Computation:
    """Model, loss and data preparation of a step, with its precision, device and other ranks."""

    model: nn.Module
    loss: Loss
    prepare: Preparation
    precision: Precision
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    features: Callable[[], FeatureSource | None] = lambda: None
    """Returns the source of feature rows; called at each micro-batch."""


@dataclass(frozen=True)
class StepSettings:
    """Treatment of gradients and of errors of memory in a step; every field is decided."""

    gradient_clip: float | None = None
    """Largest norm of all gradients."""
    on_nan: OnNan = "raise"
    on_oom: Literal["raise", "fail", "retry"] = "raise"
    """raise: errors of memory pass as they are; fail: the first ends training, with a way out; retry: less is tried."""
    may_adapt: bool = True
    """False: the first error of memory ends training, though all is prepared for a retry."""
    batches_ahead: int = 0
    """Batches copied to the device ahead of the step, for messages about memory."""


class TrainStep:
    """Makes one optimizer step: call it with a batch, and the weights change.

    Args:
        fallbacks: the size of micro-batches, which may change from step to step, and other ways to need less memory.
        listener: called within a step, and again if a step is done again.
    """

    def __init__(
        self,
        computation: Computation,
        optimizer: torch.optim.Optimizer,
        fallbacks: Fallbacks,
        settings: StepSettings = StepSettings(),
        *,
        totals: Totals | None = None,
        listener: StepListener | None = None,
        on_event: OnEvent = ignore_event,
    ) -> None:
        self.number = 0
        """Number of the latest step; to be set where training goes on."""
        self.num_micro_batches = self.largest = self.samples = 0
        """Latest step on this rank: micro-batches, samples of the largest, samples as the model counts them."""
        self.was_disturbed = False
        """A step compiled or was done again, so its time is no figure. Reset by the reader."""
        self.totals = totals or Totals()
        self._model, self._loss, self._prepare = computation.model, computation.loss, computation.prepare
        self._precision, self._device = computation.precision, computation.device
        self._ranks, self._features = computation.ranks, computation.features
        self._optimizer, self._micro, self._settings = optimizer, fallbacks.micro, settings
        self._on_event, self._listener = on_event, listener
        clip, retries = settings.gradient_clip, settings.on_oom == "retry"
        self._clip = self._ranks.clipping(optimizer, clip) if clip else None
        self._trained = list(self._model.parameters())  # to find them takes a walk through all modules
        self._is_finite: Tensor | None = None
        self._is_left_out = False
        self._num_empty = 0
        self._is_undoable = False
        """A step is under way that has changed no weight yet."""
        self._is_split_checked = False
        may_undo = retries or settings.on_nan != "raise"
        self._start = StepStart(self._model, self._device) if may_undo else None
        self._takes_start = not retries  # else `StepRetry` does
        self._retry = StepRetry(
            None if settings.on_oom == "raise" else fallbacks,
            self._start if retries else None,
            forget=self._forget,
            way_out=self._way_out,
            on_event=on_event,
            ranks=self._ranks,
            may_adapt=settings.may_adapt,
        )
        self._adapts = retries and settings.may_adapt
        self._thrash = Thrash(self._device) if self._device.type == "cuda" and self._adapts else None

    def __call__(self, delivery: Delivery) -> Tensor:
        """Makes a step on a batch; returns the loss as it was before the step.

        Raises:
            OutOfMemoryExhausted: memory does not suffice, and no fallback is left.
            RestartNeeded: it does not suffice, and the step can't be done again here.
            DataError: the step has micro-batches, or may get them, and the batch can't be cut.
        """
        self.number += 1
        self._retry.step = self.number
        self._is_left_out = False
        self._check_split(delivery)
        losses: list[Tensor] = []

        def passes() -> Tensor:
            loss = self.forward_backward(delivery, self.split(delivery))
            self._ranks.prepare_average()
            return loss

        def gradients() -> Tensor:
            """Computes gradients; an optimizer may call this more than once."""
            if self._start is not None and self._takes_start:
                self._start.take()
            self._is_undoable = not losses
            with torch.enable_grad():  # an optimizer's step may run without
                losses.append(self._retry.gradients(passes))
            self.totals.hold()
            self._ranks.average_gradients()
            if self._settings.on_nan != "raise":
                self._is_left_out = self._ranks.any(not bool(self._is_whole_step_finite()))
            if self._is_left_out:
                self._leave_out()
            listener = self._listener
            self._precision.unscale(self._optimizer, clips=self._clip is not None or listener is not None)
            if listener is not None:
                listener.before_optimizer_step(self._optimizer)
            if self._clip is not None:
                self._clip()
            self._is_undoable = False
            return losses[-1]

        def step() -> bool:
            self._precision.step(self._optimizer, gradients)
            return self._thrash is not None and self._thrash.after_step()

        self._ranks.begin_step()
        try:
            is_thrashing = self._retry.optimizer_step(self._optimizer, step)
        except _NoWeight:
            self._is_undoable = False
            return self._changed_nothing()
        self.totals.commit()
        if self._is_left_out:
            is_halved = self._settings.on_nan == "halve_lr" and halve_rate(self._optimizer)
            self._on_event("nan", step=self.number, action="halve_lr" if is_halved else "skip")
        if is_thrashing:
            message = "the allocator had to give its cache back to the device in successive steps"
            self._on_event("thrash", step=self.number, message=message)
            self._retry.step_down_without_failure()
        if self._loss.has_compiled or self._retry.has_retried:
            self._loss.has_compiled = self._retry.has_retried = False
            self.was_disturbed = True
        return losses[0]

    def undo(self) -> bool:
        """Puts generators and buffers back to the start of a step that an error ended before it changed a weight.

        Deletes gradients. Returns whether that was possible.
        """
        if not self._is_undoable or self._start is None or not self._start.is_taken:
            return False
        self._is_undoable = False
        self._forget()
        self._start.restore()
        return True

    def forward_backward(self, delivery: Delivery, parts: Sequence[MicroBatch]) -> Tensor:
        """Computes the gradients of all micro-batches, replacing any that are there; returns their loss."""
        listener = self._listener
        self._forget()
        self.num_micro_batches, self.largest, self.samples = len(parts), 0, 0
        self._is_finite = None
        for number, part in enumerate(parts):
            self.largest = max(self.largest, part.size)
            with self._ranks.micro_batch(number, len(parts)):
                with self._precision.forward():
                    loss = self._ranks.forward(self._weighted_loss, delivery, part)
                if listener is not None:
                    listener.before_backward(loss)
                with nullcontext() if part.share else self._ranks.without_gradients(self._trained):
                    self._ranks.backward(self._precision.scale(loss))
                del loss  # and with it what its graph holds
                if listener is not None:
                    listener.after_backward()
            if len(parts) > 1 and number == 0 and self._loss.overwrites:
                for weight in self._trained:  # into memory of their own, to which later gradients are added
                    weight.grad = None if weight.grad is None else weight.grad.clone()
        return self.totals.pending("loss")

    def _weighted_loss(self, delivery: Delivery, part: MicroBatch) -> Tensor:
        """Returns the loss of a micro-batch, weighted by its share; notes its figures."""
        ranks = self._ranks
        batch = batches.to_device(part.batch, self._device)
        batch = self._prepare(batch, delivery, part.number * ranks.size + ranks.number, self._features())
        try:
            output = self._loss(batch)
        except ModelError as error:
            add_place(error, delivery, "train", part.number * self.largest if ranks.size == 1 else None)
            raise
        if not delivery.is_padding:
            self.samples += part.size if output.num_samples is None else output.num_samples
        if not part.share:  # a mean over nothing is no number
            self.totals.add("loss", torch.zeros_like(output.loss), 1)
            for name, value in output.metrics.items():
                self.totals.add(name, torch.zeros_like(value), 1)
            return output.loss.nan_to_num(0.0, 0.0, 0.0) * 0
        # Ranks' gradients are averaged, so a rank's share of the step counts as often as there are ranks.
        factor = part.share * ranks.size
        overwrites = self._loss.overwrites
        self.totals.add("loss", output.loss, factor, is_overwritten=overwrites)
        for name, value in output.metrics.items():
            self.totals.add(name, value, factor, is_overwritten=overwrites)
        if self._settings.on_nan != "raise":
            is_finite = torch.isfinite(output.loss.detach())
            self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        return output.loss if factor == 1 else output.loss * factor  # without it the backward has a kernel less

    def split(self, delivery: Delivery) -> list[MicroBatch]:
        """Returns the micro-batches of a batch, each with its share of the step.

        Micro-batches without weight are left out. Each of several ranks keeps at least one, and all of them if ranks
        must do equally many. Their gradients are replaced by zeros.

        Raises:
            _NoWeight: none has any weight, on any rank.
        """
        sizes = self._sizes(delivery)
        parts = self._prepare.split(delivery.batch, sizes)
        weights = [0] * len(parts) if delivery.is_padding else self._prepare.weights(delivery, parts, sizes)
        if self._ranks.size > 1 and not self._prepare.has_own_weight:
            total: float = delivery.total
        else:
            total = self._ranks.total(sum(weights))
            if not total:
                raise _NoWeight
        found = enumerate(zip(parts, sizes, weights, strict=True))
        made = [MicroBatch(part, number, size, weight / total) for number, (part, size, weight) in found]
        if self._ranks.has_equal_parts:
            return made
        return [part for part in made if part.share] or made[:1]

    def weigh(self, delivery: Delivery) -> None:
        """Notes the weights of a batch's micro-batches, unless they are known; for a batch on the host."""
        if self._prepare.has_own_weight and delivery.weights is None and not delivery.is_padding:
            self._prepare.weigh(delivery, self._sizes(delivery))

    def allocate_state(self) -> None:
        """Makes the optimizer's state now, if it can, with fallbacks if memory does not suffice."""
        self._retry.step = self.number
        self._retry.optimizer_state(self._optimizer, partial(allocate, self._optimizer, self._model))

    def _sizes(self, delivery: Delivery) -> list[int]:
        """Returns the number of samples of each micro-batch."""
        if not self._ranks.has_equal_parts:
            return self._micro.sizes(delivery.size)
        largest_share = -(-delivery.total // self._ranks.size)
        return self._micro.sizes(delivery.size, num_parts=-(-largest_share // self._micro.size))

    def _forget(self) -> None:
        """Frees what an earlier step, or an earlier try of this one, has left."""
        self.totals.drop()
        for weight in self._trained:
            weight.grad = None

    def _check_split(self, delivery: Delivery) -> None:
        """Raises a DataError in the first step if its batch can't be cut and must be, or may have to be."""
        if self._is_split_checked or delivery.is_padding:
            return
        self._is_split_checked = True
        if self._micro.size < delivery.size or (self._adapts and self._micro.may_step_down):
            self._prepare.check_split(delivery.batch, delivery.size)

    def _is_whole_step_finite(self) -> Tensor:
        """Returns whether the loss is finite, and gradients that no scaler checks; on the device."""
        is_finite = torch.tensor(True) if self._is_finite is None else self._is_finite
        if self._precision.scaler is None:
            gradients = [weight.grad for weight in self._trained if weight.grad is not None]
            is_finite = is_finite & all_finite(gradients).to(is_finite.device)
        return is_finite

    def _changed_nothing(self) -> Tensor:
        """Ends a step without weight: it counts as a step, and changes neither weights nor the optimizer's state."""
        self._forget()
        self.num_micro_batches = self.largest = self.samples = 0
        self._num_empty += 1
        if self._num_empty & (self._num_empty - 1) == 0:  # the 1st, 2nd, 4th and so on: there may be many
            self._on_event("empty_step", step=self.number, count=self._num_empty)
        return torch.zeros((), device=self._device)

    def _leave_out(self) -> None:
        """Makes a step with a loss or gradient that is not finite change no weight and no buffer."""
        assert self._start is not None
        self._start.restore_buffers()
        for weight in self._trained:
            if self._precision.scaler is not None and weight.grad is not None:
                weight.grad.fill_(float("nan"))  # a scaler skips such a step, and fails without gradients
            else:
                weight.grad = None  # an optimizer skips weights without a gradient
        self.totals.drop(held=True)

    def _way_out(self, kind: oom.Kind) -> str:
        """Returns text for what holds the memory, and what else can be tried."""
        if kind == "host_oom" and self._device.type != "cpu":
            return breakdown.way_out_of_host(self._features())
        parts = breakdown.bytes_by_part(self._model, self._optimizer, self._features(), self._ranks.bucket_bytes)
        ahead = self._settings.batches_ahead
        less = breakdown.overrides_with_less(parts, precision=self._precision.name, batches_ahead=ahead)
        more = "a machine with more memory" if kind == "host_oom" else "a card with more memory (gpu=...)"
        ways = [*less, more, "a smaller workload.model, which learns something else"]
        return f"{breakdown.largest_parts(parts)} Next: {'; or '.join(ways)}."


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns ``model.param_groups()`` if the model has it, else one group of all trainable parameters."""
    offered = getattr(model, "param_groups", None)
    if callable(offered):
        return list(offered())
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
