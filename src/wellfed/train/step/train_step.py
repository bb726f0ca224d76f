"""Makes an optimizer step: for training, `fit`, the probe before training and the prediction of memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellfed.batches import Delivery
from wellfed.contract import FeatureModeName
from wellfed.errors import ModelError, OutOfMemoryExhausted, RestartNeeded
from wellfed.observe.timing.step_clock import OPTIMIZER, OTHER
from wellfed.record.entries import OnEvent, ignore_event
from wellfed.train.memory import breakdown, oom
from wellfed.train.memory.growth import MemoryGrowth
from wellfed.train.memory.step_down import Fallbacks
from wellfed.train.memory.step_start import StepStart
from wellfed.train.step.fused_adam import make_step
from wellfed.train.step.gradients import clip_by_norm
from wellfed.train.step.non_finite import OnNan, all_finite
from wellfed.train.step.step_passes import Computation, NoWeight, StepPasses
from wellfed.train.step.totals import Totals


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Planned options of a step and of evaluation."""

    gradient_clip: float | None = None
    """Maximum norm of all gradients; None = no limit."""
    on_nan: OnNan = "raise"
    on_oom: Literal["raise", "fail", "retry"] = "raise"
    """raise: out-of-memory errors are not handled. fail: the first ends training, with advice. retry: needs less."""
    may_adapt: bool = True
    """False: the first out-of-memory error ends training, even with ``retry``."""
    batches_ahead: int = 0
    """Number of batches copied to the device ahead of the step, for messages about memory."""
    seed: int = 0
    feature_mode: FeatureModeName | None = None
    compile_mode: str = "none"
    halve_evaluation_on_oom: bool = True
    shares_evaluation: bool = False
    """Ranks share the batches of an evaluation, and merge their metrics."""

    def goes_on(self, *, is_training: bool) -> bool:
        """Returns whether training, or an evaluation, continues with less memory after an out-of-memory error."""
        return self.may_adapt and (self.on_oom == "retry" if is_training else self.halve_evaluation_on_oom)


class TrainStep:
    """An optimizer step: a call with a batch changes the weights.

    Passes that run out of memory are repeated in place with less, from the same random numbers and buffers. An
    optimizer that runs out may have changed some weights. Other ranks wait for a rank that runs out. In both cases the
    run continues from a checkpoint.

    Args:
        fallbacks: the size of micro-batches, which may change between steps, and other ways to need less memory.
    """

    def __init__(
        self,
        computation: Computation,
        optimizer: torch.optim.Optimizer,
        fallbacks: Fallbacks,
        options: StepOptions = StepOptions(),
        *,
        totals: Totals | None = None,
        on_event: OnEvent = ignore_event,
    ) -> None:
        self.number = 0
        """Number of the latest step; set it when training is resumed."""
        self.was_disturbed = False
        """Whether a step compiled or was repeated, so that its time doesn't count. Reset by the reader."""
        self.totals = totals or Totals()
        self._checks_losses = options.on_nan != "raise"
        self.passes = StepPasses(computation, fallbacks.micro, self.totals, checks_losses=self._checks_losses)
        self._computation, self._model, self._ranks = computation, computation.model, computation.ranks
        self._loss, self._precision, self._device = computation.loss, computation.precision, computation.device
        self._optimizer, self._fallbacks, self._options = optimizer, fallbacks, options
        self._on_event = on_event
        limit = options.gradient_clip
        self._clip = partial(clip_by_norm, optimizer, limit) if limit else None
        self._adapts = options.goes_on(is_training=True)
        self._repeats = options.on_oom == "retry" and self._ranks.size == 1
        self._start = StepStart(self._model, self._device) if self._repeats or self._checks_losses else None
        self._growth = MemoryGrowth(self._device)
        # Shared by passes and optimizer, since an error of the passes goes through the optimizer's step around them.
        self._attempts = oom.Attempts()
        self._delivery: Delivery | None = None
        self._first_loss: Tensor | None = None
        """Loss of the current step, from the weights before it; None before its first passes."""
        self._is_left_out = self._is_in_passes = False
        self._num_empty = 0
        self._is_split_checked = False

    def __call__(self, delivery: Delivery) -> Tensor:
        """Makes a step on a batch; returns the loss before the step.

        Raises:
            OutOfMemoryExhausted: memory does not suffice, and no fallback is left.
            RestartNeeded: memory does not suffice, and the step can't be repeated in this process.
            ModelError: a step to be left out can't be undone.
            DataError: the batch must be cut into micro-batches, or may have to be, and can't be.
        """
        self.number += 1
        self._is_left_out = self._is_in_passes = False
        if not (self._is_split_checked or delivery.is_padding):
            self._is_split_checked = True
            micro = self._fallbacks.micro
            if micro.size < delivery.size or (self._adapts and micro.size > 1):
                self._computation.prepare.check_split(delivery.batch, delivery.size)
        self._delivery, self._first_loss = delivery, None
        try:
            if self._options.on_oom == "raise":
                self._step()
            else:
                _, failure = self._attempts(self._step)
                if failure is not None:
                    raise self._end_of_step(failure)
        except NoWeight:
            return self._changed_nothing()
        finally:
            self._delivery = None  # else the batch would stay on the device
        self.totals.commit()
        self._growth.note(self.number)
        if self._is_left_out:
            self._on_event("nan", step=self.number, action="skip")
        if self._loss.has_compiled:
            self._loss.has_compiled, self.was_disturbed = False, True
        return self._taken_loss()

    def _taken_loss(self) -> Tensor:
        loss, self._first_loss = self._first_loss, None
        if loss is None:
            name = type(self._optimizer).__name__
            raise ModelError(
                f"{name}.step did not call the closure that it was given, so no gradient was computed. Begin "
                "step(self, closure=None) with: loss = closure() if closure is not None else None."
            )
        return loss

    def _step(self) -> None:
        """Calls the optimizer."""
        if self._precision.scaler is None:
            make_step(self._optimizer, self._gradients)
        else:
            self._precision.scaled_step(self._optimizer, self._gradients)
        self.passes.mark((OTHER, self.passes.now_s()))

    def _gradients(self) -> Tensor:
        """Computes gradients for the optimizer, which may call it repeatedly; returns the loss."""
        passes = self._passes_until_they_fit if self._repeats else self._run_passes
        if self._start is not None:
            self._start.is_taken = False
        self._is_in_passes = True
        if torch.is_grad_enabled():
            loss = passes()
        else:
            with torch.enable_grad():  # an optimizer's step may disable gradients
                loss = passes()
        self._is_in_passes = False
        if self._first_loss is None:
            self._first_loss = loss
        self.totals.hold()
        self.passes.mark((OPTIMIZER, self.passes.now_s()))
        if self._checks_losses:
            self._is_left_out = self._ranks.any(not bool(self._is_whole_step_finite()))
            if self._is_left_out:
                self._leave_out()
        if self._precision.scaler is not None:
            self._precision.unscale(self._optimizer, clips=self._clip is not None)
        if self._clip is not None:
            self._clip()
        return loss

    def _run_passes(self) -> Tensor:
        assert self._delivery is not None
        if self._start is not None and not self._start.is_taken:
            self._start.take()
        try:
            loss = self.passes(self._delivery)
        except Exception as error:
            self._loss.check(error)  # torch compiles a backward pass at its first call
            raise
        self._ranks.check_gradients()
        return loss

    # -- out of memory ------------------------------------------------------------------------------------------------

    def _passes_until_they_fit(self) -> Tensor:
        """Makes the passes, after each memory failure with the next fallback."""
        assert self._start is not None
        while True:
            loss, failure = self._attempts(self._run_passes)
            if failure is None:
                assert loss is not None
                return loss
            message = self._take_less(failure, "")
            try:
                self._start.restore()
            except ModelError as error:
                text, changes = f"{message} {error}", self._fallbacks.changes()
                raise RestartNeeded(text, changes, failure.kind, is_suspect=failure.is_suspect) from error

    def _end_of_step(self, failure: oom.MemoryFailure) -> OutOfMemoryExhausted:
        """Returns the error that ends a step which can't be repeated, after taking the next fallback for a restart."""
        where = f" on rank {self._ranks.number}" if self._ranks.size > 1 else ""
        where += "" if self._is_in_passes else f" in the optimizer's step {self.number},"
        message = self._take_less(failure, where)
        return RestartNeeded(message, self._fallbacks.changes(), failure.kind, is_suspect=failure.is_suspect)

    def _take_less(self, failure: oom.MemoryFailure, where: str) -> str:
        """Frees what a failed attempt has left, and takes the next fallback; returns the failure in a sentence.

        Raises:
            OutOfMemoryExhausted: no fallback is left, none is allowed, or memory grows with every step.
        """
        self.passes.mark((OTHER, self.passes.now_s()))  # the time until here counts to the phase that failed
        self.passes.forget()
        oom.release()
        self._on_event("oom", step=self.number, message=failure.message)
        fallbacks, grown = self._fallbacks, self._growth.describe()
        tried = fallbacks.tried()
        changed = None
        if self._adapts and not grown:
            changed = fallbacks.step_down(None if self._is_in_passes else self._optimizer)
        if changed is None:  # a last fallback may have run out of memory itself
            message = f"Out of memory{where} with {fallbacks.tried()}: {failure.message}"
            text = f"{grown} {message}" if grown else f"{message} {self._way_out(failure.kind)}"
            raise OutOfMemoryExhausted(text, failure.kind)
        self._on_event("step_down" if "micro_batch" in changed else "ladder", step=self.number, **changed)
        self.was_disturbed = True
        return f"Out of memory{where} with {tried}: {failure.message}"

    def _way_out(self, kind: oom.Kind) -> str:
        """Returns text with the largest users of memory and overrides that need less."""
        if kind == "host_oom":
            ways = "fewer loader.num_workers, a smaller loader.prefetch_factor, a smaller workload.model"
            return f"It is the host's memory. Next: {ways}, or a machine with more memory."
        features = self._computation.features()
        parts = breakdown.bytes_by_part(self._model, [self._optimizer], features, self._ranks.bucket_bytes)
        ahead = self._options.batches_ahead
        return breakdown.way_out(parts, precision=self._precision.name, batches_ahead=ahead)

    # -- steps that are left out --------------------------------------------------------------------------------------

    def _is_whole_step_finite(self) -> Tensor:
        """Returns whether the loss is finite, and gradients too unless a scaler checks them. A tensor on the device."""
        found = self.passes.losses_are_finite
        is_finite = torch.tensor(True) if found is None else found
        if self._precision.scaler is None:
            gradients = [weight.grad for weight in self.passes.trained if weight.grad is not None]
            is_finite = is_finite & all_finite(gradients).to(is_finite.device)
        return is_finite

    def _changed_nothing(self) -> Tensor:
        """Ends a step without weight, which counts but changes neither weights nor the optimizer's state."""
        passes = self.passes
        passes.forget()
        passes.num_micro_batches = passes.largest = passes.samples = 0
        self._num_empty += 1
        if self._num_empty & (self._num_empty - 1) == 0:  # only the 1st, 2nd, 4th and so on, since there may be many
            self._on_event("empty_step", step=self.number, count=self._num_empty)
        return torch.zeros((), device=self._device)

    def _leave_out(self) -> None:
        """Keeps a step with a non-finite loss or gradient from changing weights and buffers."""
        assert self._start is not None
        self._start.restore_buffers()
        for weight in self.passes.trained:
            if self._precision.scaler is not None and weight.grad is not None:
                weight.grad.fill_(float("nan"))  # a scaler skips such a step, and fails without gradients
            else:
                weight.grad = None  # an optimizer skips weights without a gradient
        self.totals.drop(held=True)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns ``model.param_groups()`` if the model has it, else one group of all trainable parameters."""
    offered = getattr(model, "param_groups", None)
    if callable(offered):
        return list(offered())
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
