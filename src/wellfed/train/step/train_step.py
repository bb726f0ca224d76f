"""Makes an optimizer step: for training, `fit`, the probe before training and the prediction of memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellfed.batches import Delivery
from wellfed.contract import FeatureModeName
from wellfed.errors import ConfigError, ModelError, OutOfMemoryExhausted, RestartNeeded
from wellfed.observe.timing.step_clock import OPTIMIZER, OTHER
from wellfed.record.entries import OnEvent, ignore_event
from wellfed.train.memory import oom
from wellfed.train.memory.reasons import MemoryGrowth, way_out
from wellfed.train.memory.step_down import Fallbacks
from wellfed.train.memory.step_start import StepStart
from wellfed.train.step.fused_adam import make_step
from wellfed.train.step.gradients import clip_by_norm
from wellfed.train.step.non_finite import OnNan, all_finite
from wellfed.train.step.step_passes import Computation, NoWeight
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
        passes: computes the gradients.
        fallbacks: the size of micro-batches, which may change between steps, and other ways to need less memory.

    Raises:
        ConfigError: the optimizer computes gradients itself, by a closure.
    """

    def __init__(
        self,
        passes: Computation,
        optimizer: torch.optim.Optimizer,
        fallbacks: Fallbacks,
        options: StepOptions = StepOptions(),
        *,
        totals: Totals | None = None,
        on_event: OnEvent = ignore_event,
    ) -> None:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            problem = f"{type(optimizer).__name__} computes the gradients of a step itself, by a closure."
            instead = "Take another optimizer, or train it in a LightningModule, whose Trainer passes a closure."
            raise ConfigError.of("workload.optimizer", problem, instead)
        self.number = 0
        """Number of the latest step; set it when training is resumed."""
        self.was_disturbed = False
        """Whether a step compiled or was repeated, so that its time doesn't count. Reset by the reader."""
        self.passes, self.totals = passes, totals or Totals()
        passes.micro, passes.totals = fallbacks.micro, self.totals
        self._optimizer, self._fallbacks, self._options = optimizer, fallbacks, options
        self._on_event, self._adapts = on_event, options.goes_on(is_training=True)
        self._repeats = options.on_oom == "retry" and passes.ranks.size == 1
        has_start = self._repeats or options.on_nan == "skip"
        self._start = StepStart(passes.model, passes.device) if has_start else None
        self._growth = MemoryGrowth(passes.device)
        self._attempt: Callable[..., Any] = _once if options.on_oom == "raise" else oom.attempt
        self._num_empty = 0

    def __call__(self, delivery: Delivery) -> Tensor:
        """Makes a step on a batch; returns the loss before the step.

        Raises:
            OutOfMemoryExhausted: memory does not suffice, and no fallback is left.
            RestartNeeded: memory does not suffice, and the step can't be repeated in this process.
            ModelError: a step to be left out can't be undone.
            DataError: the batch must be cut into micro-batches, and can't be.
        """
        self.number += 1
        if self._start is not None:
            self._start.is_taken = False
        try:
            loss, failure = self._attempt(self._run_passes, delivery)
            while failure is not None:
                self._go_back(failure)
                loss, failure = self._attempt(self._run_passes, delivery)
        except NoWeight:
            return self._changed_nothing()
        _, failure = self._attempt(self._update, loss)
        if failure is not None:
            message = self._take_less(failure, f" in the optimizer's step {self.number},")
            raise RestartNeeded(message, self._fallbacks.changes(), failure.kind)
        self.totals.commit()
        self._growth.note(self.number)
        if self.passes.loss.has_compiled:
            self.passes.loss.has_compiled, self.was_disturbed = False, True
        return loss  # type: ignore[no-any-return]

    def _run_passes(self, delivery: Delivery) -> Tensor:
        if self._start is not None and not self._start.is_taken:
            self._start.take()
        try:
            return self.passes(delivery)
        except Exception as error:
            self.passes.loss.explain(error)  # torch compiles a backward pass at its first call
            raise

    def _update(self, loss: Tensor) -> None:
        """Changes the weights by their gradients, unless the step is left out."""
        passes, optimizer, clip = self.passes, self._optimizer, self._options.gradient_clip
        scaler = passes.precision.scaler
        passes.mark((OPTIMIZER, passes.now_s()))
        if self._options.on_nan == "skip" and passes.ranks.any(not self._is_finite(loss)):
            self._leave_out()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            clip_by_norm(optimizer, clip)
        if scaler is None:
            make_step(optimizer)
        else:  # makes no step if a gradient is NaN or infinite
            scaler.step(optimizer)
            scaler.update()
        passes.mark((OTHER, passes.now_s()))

    # -- out of memory ------------------------------------------------------------------------------------------------

    def _go_back(self, failure: oom.MemoryFailure) -> None:
        """Takes the next fallback, and goes back to the start of the step."""
        message = self._take_less(failure)
        if self._start is not None and self._repeats:
            try:
                self._start.restore(repeats=True)
                return
            except ModelError as error:
                message += f" {error}"
        raise RestartNeeded(message, self._fallbacks.changes(), failure.kind)

    def _take_less(self, failure: oom.MemoryFailure, where: str = "") -> str:
        """Frees what a failed attempt has left, and takes the next fallback; returns the failure in a sentence.

        Raises:
            OutOfMemoryExhausted: no fallback is left, none is allowed, or memory grows with every step.
        """
        passes, fallbacks, grown = self.passes, self._fallbacks, self._growth.describe()
        passes.mark((OTHER, passes.now_s()))  # the time until here counts to the phase that failed
        passes.forget()
        oom.release()
        self._on_event("oom", step=self.number, message=failure.message)
        rank = f" on rank {passes.ranks.number}" if passes.ranks.size > 1 else ""
        ran_out = f"Out of memory{rank}{where} with {fallbacks.tried()}: {failure.message}"
        if grown:
            raise OutOfMemoryExhausted(f"{grown} {ran_out}", failure.kind)
        changed = fallbacks.step_down() if self._adapts else None
        if changed is None:
            precision, features = passes.precision.name, passes.features()
            advice = way_out(failure.kind, passes.model, [self._optimizer], features, precision=precision)
            raise OutOfMemoryExhausted(f"{ran_out} {advice}", failure.kind)
        self._on_event("step_down" if "micro_batch" in changed else "ladder", step=self.number, **changed)
        self.was_disturbed = True
        return ran_out

    # -- steps that are left out --------------------------------------------------------------------------------------

    def _is_finite(self, loss: Tensor) -> bool:
        """Returns whether the loss is finite, and gradients too unless a scaler checks them. Waits for the device."""
        is_finite = torch.isfinite(loss)
        if self.passes.precision.scaler is None:
            gradients = [weight.grad for weight in self.passes.trained if weight.grad is not None]
            is_finite = is_finite & all_finite(gradients).to(is_finite.device)
        return bool(is_finite)

    def _leave_out(self) -> None:
        """Keeps a step with a non-finite loss or gradient from changing weights and buffers."""
        assert self._start is not None
        self._start.restore(repeats=False)
        for weight in self.passes.trained:
            if self.passes.precision.scaler is not None and weight.grad is not None:
                weight.grad.fill_(float("nan"))  # a scaler skips such a step, and fails without gradients
            else:
                weight.grad = None  # an optimizer skips weights without a gradient
        self.totals.drop()
        self._on_event("nan", step=self.number, action="skip")

    def _changed_nothing(self) -> Tensor:
        """Ends a step without weight, which counts but changes neither weights nor the optimizer's state."""
        passes = self.passes
        passes.forget()
        passes.num_micro_batches = passes.largest = passes.samples = 0
        self._num_empty += 1
        if self._num_empty & (self._num_empty - 1) == 0:  # only the 1st, 2nd, 4th and so on, since there may be many
            self._on_event("empty_step", step=self.number, count=self._num_empty)
        return torch.zeros((), device=passes.device)


def _once(work: Callable[..., Any], *arguments: Any) -> tuple[Any, None]:
    """Makes an attempt whose memory errors are raised."""
    return work(*arguments), None


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns ``model.param_groups()`` if the model has it, else one group of all trainable parameters."""
    offered = getattr(model, "param_groups", None)
    if callable(offered):
        return list(offered())
    return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]
