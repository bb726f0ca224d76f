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


class StepRetry:
    """Repetition of a step that ran out of memory, in place, after taking the next fallback.

    Args:
        fallbacks: ways to need less memory; None = out-of-memory errors are not handled.
        start: state at the start of a step; None = nothing is repeated, a failure ends the run.
        forget: frees gradients and sums of a failed step.
        way_out: returns advice about a kind of memory, for the end of a message.
        may_adapt: False = the first failure ends the run, even if fallbacks are left.
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
    ) -> None:
        self._fallbacks, self._start, self._may_adapt = fallbacks, start, may_adapt
        self._forget, self._way_out, self._on_event = forget, way_out, on_event
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
        if self._fallbacks is None:
            return attempt()
        if self._start is not None:
            self._start.is_taken = False
        result: Any
        while True:
            result, failure = self._attempts(self._from_start, attempt)
            if failure is None:
                return result  # type: ignore[no-any-return]
            del result
            self._free(failure)
            if not self._goes_on_with(self._smaller_passes()):
                raise self._exhausted(failure)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, attempt: Callable[[], bool]) -> bool:
        """Calls an optimizer's step around `gradients`; returns whether ``attempt`` returned True on any rank.

        Raises:
            OutOfMemoryExhausted: nothing is left to change.
            RestartNeeded: memory ran out in the optimizer itself, which may have changed some weights.
        """
        if self._start is None:
            return attempt()
        result, failure = self._attempts(attempt)
        if failure is None:
            return bool(result)
        self._free(failure)
        where = f"in the optimizer's step {self.step},"
        changed = self._smaller_optimizer(optimizer)
        if changed is None:
            raise self._exhausted(failure, where)
        self._report(changed)
        assert self._fallbacks is not None
        message, changes = self._ran_out(failure, where), self._fallbacks.changes()
        raise RestartNeeded(message, changes, failure.kind, is_suspect=failure.is_suspect)

    def step_down_without_failure(self) -> None:
        """Takes the next fallback between two steps, if one is left."""
        changed = None if self._fallbacks is None else self._fallbacks.step_down()
        if changed is not None:
            oom.release()
            self._report(changed)

    def _from_start(self, attempt: Callable[[], Result]) -> Result:
        if self._start is not None and not self._start.is_taken:
            self._start.take()
        return attempt()

    def _goes_on_with(self, changed: dict[str, Any] | None) -> bool:
        if changed is None:
            return False
        assert self._start is not None
        self._report(changed)
        self._start.restore()
        return True

    def _smaller_passes(self, *, of_held: bool = False) -> dict[str, Any] | None:
        """Takes the next fallback; returns the facts of the change, or None if none is left."""
        if self._fallbacks is None or self._start is None or not self._may_adapt:
            return None
        return self._fallbacks.step_down(of_held=of_held)

    def _one_by_one(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Makes the optimizer work on one weight at a time; returns the facts of the change, or None."""
        if not (self._may_adapt and one_weight_at_a_time(optimizer)):
            return None
        change = "workload.optimizer.foreach=false"
        if self._fallbacks is not None:
            self._fallbacks.note(change)
        return {"change": change}

    def _smaller_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Makes the optimizer's step need less memory; returns the facts of the change, or None.

        The micro-batch does not change the size of weights, gradients and states. So it is the last resort.
        """
        return self._one_by_one(optimizer) or self._smaller_passes(of_held=True) or self._smaller_passes()

    def _exhausted(self, failure: oom.MemoryFailure, where: str = "") -> OutOfMemoryExhausted:
        return OutOfMemoryExhausted(f"{self._ran_out(failure, where)} {self._way_out(failure.kind)}", failure.kind)

    def _ran_out(self, failure: oom.MemoryFailure, where: str) -> str:
        assert self._fallbacks is not None
        return f"Out of memory {f'{where} ' if where else ''}with {self._fallbacks.tried()}: {failure.message}"

    def _free(self, failure: oom.MemoryFailure) -> None:
        self._forget()
        oom.release()
        self._on_event("oom", step=self.step, message=failure.message)

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

    def optimizer_step(self, optimizer: torch.optim.Optimizer, attempt: Callable[[], bool]) -> bool:
        """Calls an optimizer's step around `gradients`; returns whether ``attempt`` returned True on any rank."""
        self._is_in_passes = False
        try:
            return bool(self._agreed(attempt))
        except StepFailed:
            pass  # its traceback holds the step's tensors, so leave it before freeing
        raise self._ended(optimizer)

    def _agreed(self, attempt: Callable[[], Any]) -> Any:
        """Returns the result of an attempt that succeeded on all ranks. A bool is True if it is True on any rank."""
        result, failure = self._attempts(attempt)
        if failure is not None:
            self._own_failure = failure
        is_any = self._ranks.agree(failed=failure is not None, flag=result is True)
        return is_any if isinstance(result, bool) else result

    def _ended(self, optimizer: torch.optim.Optimizer) -> OutOfMemoryExhausted:
        """Returns the error that ends the step on all ranks: that of the first rank that ran out of memory."""
        failure, self._own_failure = self._own_failure, None
        is_in_passes, self._is_in_passes = self._is_in_passes, False
        self._forget()
        oom.release()
        own: _Ending | None = None
        if failure is not None:
            within = "" if is_in_passes else f" in the optimizer's step {self.step},"
            where = f"on rank {self._ranks.number}{within}"
            ran_out = self._ran_out(failure, where)
            changed = self._smaller_passes() if is_in_passes else self._smaller_optimizer(optimizer)
            if changed is None:
                ran_out = f"{self._ran_out(failure, where)} {self._way_out(failure.kind)}"
            assert self._fallbacks is not None
            own = _Ending(failure, ran_out, changed, self._fallbacks.changes())
        given = self._ranks.gather(own)
        rank, ending = next((rank, one) for rank, one in enumerate(given) if one is not None)
        kind = ending.failure.kind
        self._on_event("oom", step=self.step, message=ending.failure.message, rank=rank)
        error = OutOfMemoryExhausted(ending.message, kind)
        if ending.changed is not None:
            self._report(ending.changed)
            error = RestartNeeded(ending.message, ending.changes, kind, is_suspect=ending.failure.is_suspect)
        error.is_of_other_rank = self._ranks.number > 0
        return error
