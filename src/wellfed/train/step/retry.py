"""Repeats a step that ran out of memory with less, or ends it on all ranks so that the run restarts with less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from wellfed.errors import OutOfMemoryExhausted, RestartNeeded
from wellfed.record.entries import OnEvent
from wellfed.train.memory import oom
from wellfed.train.memory.growth import MemoryGrowth
from wellfed.train.memory.step_down import Fallbacks, one_weight_at_a_time
from wellfed.train.memory.step_start import StepStart
from wellfed.train.step.replicas import Ranks, StepFailed

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Ending:
    """End of a step on a rank that ran out of memory, sent to all ranks."""

    failure: oom.MemoryFailure
    message: str
    changed: dict[str, Any] | None
    """Facts of the change that the run restarts with; None if nothing was left to change."""
    changes: dict[str, object]

    def error(self) -> OutOfMemoryExhausted:
        """Returns the error that ends the step."""
        if self.changed is None:
            return OutOfMemoryExhausted(self.message, self.failure.kind)
        return RestartNeeded(self.message, self.changes, self.failure.kind, is_suspect=self.failure.is_suspect)


class StepRetry:
    """Repetition of a step that ran out of memory, in place, after taking the next fallback.

    Args:
        fallbacks: ways to need less memory; None = out-of-memory errors are not handled.
        start: state at the start of a step; None = nothing is repeated, a failure ends the run.
        forget: frees gradients and sums of a failed step.
        way_out: returns advice about a kind of memory, for the end of a message.
        may_adapt: False = the first failure ends the run, even if fallbacks are left.
        growth: readings of the memory after earlier steps. Fallbacks don't help if it grew with every step.
    """

    def __init__(
        self,
        fallbacks: Fallbacks | None,
        start: StepStart | None,
        *,
        forget: Callable[[], None],
        way_out: Callable[[oom.Kind], str],
        on_event: OnEvent,
        may_adapt: bool = True,
        growth: MemoryGrowth | None = None,
    ) -> None:
        self._growth = growth
        self._fallbacks, self._start = fallbacks, start
        self._forget, self._way_out, self._on_event = forget, way_out, on_event
        self._adapts = may_adapt and start is not None
        # Shared by passes and optimizer, since an error of the passes goes through the optimizer's step around them.
        self._attempts = oom.Attempts()
        self.step = 0
        """Number of the current step, for events."""
        self.has_retried = False
        """True after a step was repeated; reset by the reader."""

    def gradients(self, attempt: Callable[[], Result]) -> Result:
        """Returns the result of the forward and backward passes. Repetitions start from the same random numbers.

        Raises:
            OutOfMemoryExhausted: nothing is left to change.
        """
        fallbacks, start = self._fallbacks, self._start
        if fallbacks is None:
            return attempt()
        if start is not None:
            start.is_taken = False
        result: Any
        while True:
            result, failure = self._attempts(self._from_start, attempt)
            if failure is None:
                return result  # type: ignore[no-any-return]
            del result
            self._free()
            self._on_event("oom", step=self.step, message=failure.message)
            tried = fallbacks.tried()
            changed = fallbacks.step_down() if self._adapts and not self._grown() else None
            if changed is None:
                raise self._ending(fallbacks, failure, "", tried, None).error()
            self._report(changed)
            if start is not None:
                start.restore()

    def optimizer_step(self, optimizer: torch.optim.Optimizer, attempt: Callable[[], None]) -> None:
        """Calls an optimizer's step around `gradients`.

        Raises:
            OutOfMemoryExhausted: nothing is left to change.
            RestartNeeded: memory ran out in the optimizer itself, which may have changed some weights.
        """
        if self._fallbacks is None or self._start is None:
            attempt()
            return
        _, failure = self._attempts(attempt)
        if failure is None:
            return
        self._free()
        self._on_event("oom", step=self.step, message=failure.message)
        where, tried = f" in the optimizer's step {self.step},", self._fallbacks.tried()
        changed = self._smaller_optimizer(optimizer, self._fallbacks)
        if changed is not None:
            self._report(changed)
        raise self._ending(self._fallbacks, failure, where, tried, changed).error()

    def _from_start(self, attempt: Callable[[], Result]) -> Result:
        if self._start is not None and not self._start.is_taken:
            self._start.take()
        return attempt()

    def _smaller_optimizer(self, optimizer: torch.optim.Optimizer, fallbacks: Fallbacks) -> dict[str, Any] | None:
        """Makes the optimizer's step need less memory; returns the facts of the change, or None.

        The micro-batch does not change the size of weights, gradients and states. So it is the last resort.
        """
        if not self._adapts or self._grown():
            return None
        if one_weight_at_a_time(optimizer):
            change = "workload.optimizer.foreach=false"
            fallbacks.note(change)
            return {"change": change}
        return fallbacks.step_down(of_held=True) or fallbacks.step_down()

    def _ending(
        self,
        fallbacks: Fallbacks,
        failure: oom.MemoryFailure,
        where: str,
        tried: str,
        changed: dict[str, Any] | None,
    ) -> _Ending:
        """Returns the end of a step; ``tried``: what was in use when memory ran out."""
        if changed is None:
            tried = fallbacks.tried()  # also a fallback that ran out of memory itself
        message = f"Out of memory{where} with {tried}: {failure.message}"
        if changed is None:
            message = f"{grown} {message}" if (grown := self._grown()) else f"{message} {self._way_out(failure.kind)}"
        return _Ending(failure, message, changed, fallbacks.changes())

    def _grown(self) -> str:
        """Returns the sentence of `MemoryGrowth.describe`; empty if memory did not grow with every step."""
        return "" if self._growth is None else self._growth.describe()

    def _free(self) -> None:
        self._forget()
        oom.release()

    def _report(self, changed: dict[str, Any]) -> None:
        self._on_event("step_down" if "micro_batch" in changed else "ladder", step=self.step, **changed)
        self.has_retried = True


class EndOnAllRanks(StepRetry):
    """End of a step on several ranks (`AgreeingReplicas`) when memory runs out on one of them.

    All ranks raise the same RestartNeeded, and the run continues from a checkpoint.
    """

    def __init__(self, *arguments: Any, ranks: Ranks, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._ranks = ranks
        self._own_failure: oom.MemoryFailure | None = None
        self._is_in_passes = False

    def gradients(self, attempt: Callable[[], Result]) -> Result:
        """Returns the result of the passes. Raises a StepFailed on all ranks, which `optimizer_step` handles."""
        assert self._start is not None
        self._start.is_taken, self._is_in_passes = False, True
        result: Any = self._agreed(partial(self._from_start, attempt))
        self._is_in_passes = False
        return result  # type: ignore[no-any-return]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, attempt: Callable[[], None]) -> None:
        """Calls an optimizer's step around `gradients`."""
        self._is_in_passes = False
        try:
            self._agreed(attempt)
            return
        except StepFailed:
            pass  # its traceback holds the step's tensors, so leave it before freeing
        raise self._ended(optimizer)

    def _agreed(self, attempt: Callable[[], Any]) -> Any:
        """Returns the result of an attempt that succeeded on all ranks."""
        result, failure = self._attempts(attempt)
        if failure is not None:
            self._own_failure = failure
        self._ranks.agree(failed=failure is not None)
        return result

    def _ended(self, optimizer: torch.optim.Optimizer) -> OutOfMemoryExhausted:
        """Returns the error that ends the step on all ranks: that of the first rank that ran out of memory."""
        failure, self._own_failure = self._own_failure, None
        self._free()
        own: _Ending | None = None
        if failure is not None:
            fallbacks = self._fallbacks
            assert fallbacks is not None
            within = "" if self._is_in_passes else f" in the optimizer's step {self.step},"
            where, tried = f" on rank {self._ranks.number}{within}", fallbacks.tried()
            if self._is_in_passes:
                changed = fallbacks.step_down() if self._adapts and not self._grown() else None
            else:
                changed = self._smaller_optimizer(optimizer, fallbacks)
            own = self._ending(fallbacks, failure, where, tried, changed)
        given = self._ranks.gather(own)
        rank, ending = next((rank, one) for rank, one in enumerate(given) if one is not None)
        self._on_event("oom", step=self.step, message=ending.failure.message, rank=rank)
        if ending.changed is not None:
            self._report(ending.changed)
        error = ending.error()
        error.is_of_other_rank = self._ranks.number > 0
        return error
