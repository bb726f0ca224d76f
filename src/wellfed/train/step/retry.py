"""Repeats a step that ran out of memory with less, or ends it on all ranks so that the run restarts with less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    """End of an attempt on a rank that ran out of memory, sent to all ranks if they end the step together."""

    failure: oom.MemoryFailure
    message: str
    changed: dict[str, Any] | None
    """Facts of the change that the step or the run goes on with; None if nothing was left to change."""
    changes: dict[str, object]

    def error(self) -> OutOfMemoryExhausted:
        """Returns the error that ends the step."""
        if self.changed is None:
            return OutOfMemoryExhausted(self.message, self.failure.kind)
        return RestartNeeded(self.message, self.changes, self.failure.kind, is_suspect=self.failure.is_suspect)


class StepRetry:
    """Repetition of a step that ran out of memory, in place, after taking the next fallback.

    Ranks that end a step together (`AgreeingReplicas`) repeat nothing in place. All raise the same RestartNeeded, and
    the run continues from a checkpoint.

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
        growth: MemoryGrowth,
        may_adapt: bool,
        ranks: Ranks,
    ) -> None:
        self._fallbacks, self._start, self._growth, self._ranks = fallbacks, start, growth, ranks
        self._forget, self._way_out, self._on_event = forget, way_out, on_event
        self._adapts = may_adapt and start is not None
        self._ends_together = ranks.ends_together and start is not None
        # Shared by passes and optimizer, since an error of the passes goes through the optimizer's step around them.
        self._attempts = oom.Attempts()
        self._try: Callable[..., tuple[Any, oom.MemoryFailure | None]]
        self._try = self._agreed if self._ends_together else self._attempts
        self._own_failure: oom.MemoryFailure | None = None
        """Failure of this rank, until the ranks end the step."""
        self._is_in_passes = False
        self.step = 0
        """Number of the current step, for events."""
        self.has_retried = False
        """True after a step was repeated; reset by the reader."""

    def gradients(self, attempt: Callable[[], Result]) -> Result:
        """Returns the result of the forward and backward passes. Repetitions start from the same random numbers.

        Raises:
            OutOfMemoryExhausted: nothing is left to change.
            StepFailed: memory ran out on a rank of those that end a step together; `optimizer_step` handles it.
        """
        if self._fallbacks is None:
            return attempt()
        if self._start is not None:
            self._start.is_taken = False
        result: Any
        self._is_in_passes = True
        while True:
            result, failure = self._try(self._from_start, attempt)
            if failure is None:
                self._is_in_passes = False
                return result  # type: ignore[no-any-return]
            del result
            ending = self._take_less(self._fallbacks, failure)
            self._report(ending)
            if ending.changed is None:
                raise ending.error()
            if self._start is not None:
                self._start.restore()

    def optimizer_step(self, optimizer: torch.optim.Optimizer, attempt: Callable[[], None]) -> None:
        """Calls an optimizer's step around `gradients`.

        Raises:
            OutOfMemoryExhausted: nothing is left to change.
            RestartNeeded: memory ran out in the optimizer itself, which may have changed some weights, or on a rank of
                those that end a step together.
        """
        if self._fallbacks is None or self._start is None:
            attempt()
            return
        self._is_in_passes = False
        try:
            _, failure = self._try(attempt)
            if failure is None:
                return
        except StepFailed:  # its traceback holds the step's tensors, so leave it before freeing
            failure, self._own_failure = self._own_failure, None
        own: _Ending | None = None
        if failure is None:
            self._free()
        else:
            own = self._take_less(self._fallbacks, failure, None if self._is_in_passes else optimizer)
        given = self._ranks.gather(own)
        rank, ending = next((rank, one) for rank, one in enumerate(given) if one is not None)
        self._report(ending, **({"rank": rank} if self._ends_together else {}))
        error = ending.error()
        error.is_of_other_rank = self._ranks.number > 0
        raise error

    def _from_start(self, attempt: Callable[[], Result]) -> Result:
        if self._start is not None and not self._start.is_taken:
            self._start.take()
        return attempt()

    def _agreed(self, attempt: Callable[..., Any], *arguments: Any) -> tuple[Any, oom.MemoryFailure | None]:
        """Returns the result of an attempt of ranks that end a step together. Raises a StepFailed if one has failed."""
        result, failure = self._attempts(attempt, *arguments)
        self._own_failure = failure
        self._ranks.agree(failed=failure is not None)
        return result, failure

    def _take_less(
        self, fallbacks: Fallbacks, failure: oom.MemoryFailure, optimizer: torch.optim.Optimizer | None = None
    ) -> _Ending:
        """Frees what a failed attempt has left, and takes the next fallback.

        Args:
            optimizer: memory ran out in its step; None = in the passes.
        """
        self._free()
        tried, grown = fallbacks.tried(), self._growth.describe()
        changed: dict[str, Any] | None = None
        if self._adapts and not grown:
            changed = fallbacks.step_down() if optimizer is None else _smaller_optimizer(optimizer, fallbacks)
        where = f" on rank {self._ranks.number}" if self._ends_together else ""
        where += "" if optimizer is None else f" in the optimizer's step {self.step},"
        # If nothing has changed, a fallback may have run out of memory itself.
        message = f"Out of memory{where} with {fallbacks.tried() if changed is None else tried}: {failure.message}"
        if changed is None:
            message = f"{grown} {message}" if grown else f"{message} {self._way_out(failure.kind)}"
        return _Ending(failure, message, changed, fallbacks.changes())

    def _free(self) -> None:
        self._forget()
        oom.release()

    def _report(self, ending: _Ending, **about: Any) -> None:
        self._on_event("oom", step=self.step, message=ending.failure.message, **about)
        if (changed := ending.changed) is not None:
            self._on_event("step_down" if "micro_batch" in changed else "ladder", step=self.step, **changed)
            self.has_retried = True


def _smaller_optimizer(optimizer: torch.optim.Optimizer, fallbacks: Fallbacks) -> dict[str, Any] | None:
    """Makes the optimizer's step need less memory; returns the facts of the change, or None.

    The micro-batch does not change the size of weights, gradients and states. So it is the last resort.
    """
    if one_weight_at_a_time(optimizer):
        change = "workload.optimizer.foreach=false"
        fallbacks.note(change)
        return {"change": change}
    return fallbacks.step_down(of_held=True) or fallbacks.step_down()
