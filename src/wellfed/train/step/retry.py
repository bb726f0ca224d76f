"""Does a training step again, in a way that needs less memory, where memory did not suffice for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from wellfed.errors import OutOfMemoryExhausted, RestartNeeded
from wellfed.record import OnEvent
from wellfed.train.memory import oom
from wellfed.train.memory.ladder import Ladder
from wellfed.train.memory.optimizer_state import BeforeStep, one_weight_at_a_time
from wellfed.train.memory.remembered import FOREACH
from wellfed.train.memory.step_start import StepStart
from wellfed.train.step.ranks import OtherRankFailed, Ranks

Result = TypeVar("Result")

_OF_ANOTHER = oom.MemoryFailure("device_oom", "another rank ran out of memory.")


class StepRetry:
    """Calls a step until it fits; each failure takes the ladder's next way of needing less.

    Args:
        ladder: None = errors of memory pass as they are.
        start: None = nothing is done again, a failure ends the run.
        forget: lets go of what a failed step has left: gradients, sums.
        way_out: ends an error about a kind of memory: what holds it, and what else can be done.
        may_adapt: False = the first failure ends the run, whatever is left of the ladder.
    """

    def __init__(
        self,
        ladder: Ladder | None,
        start: StepStart | None,
        *,
        forget: Callable[[], None],
        way_out: Callable[[oom.Kind], str],
        on_event: OnEvent,
        ranks: Ranks | None = None,
        may_adapt: bool = True,
    ) -> None:
        self._ladder, self._start, self._may_adapt = ladder, start, may_adapt
        self._ranks = ranks or Ranks()
        self._forget, self._way_out, self._on_event = forget, way_out, on_event
        # One for all: what the passes have raised as what it is goes through the optimizer's step that is around them.
        self._attempts = oom.Attempts()
        self.step = 0
        """Number of the one that is done, for events."""
        self.has_retried = False
        """Turns true when a step has been done again; reset by who reads it."""

    def gradients(self, attempt: Callable[[], Result]) -> Result:
        """The result of the forward and backward passes; a repetition starts from where generators and buffers are now.

        Raises:
            OutOfMemoryExhausted: nothing is left to change.
        """
        if self._ladder is None:
            return attempt()
        if self._start is not None:
            self._start.is_taken = False
        while True:
            result, failure = self._tried(partial(self._from_start, attempt))
            if failure is None and self._ranks.lacks_gradients:
                failure = self._tried(self._ranks.fill_gradients)[1]
            if failure is None:
                return result  # type: ignore[no-any-return]
            del result
            self._free(failure)
            if not self._has_stepped_down():
                raise self._exhausted(failure)

    def optimizer_state(self, optimizer: torch.optim.Optimizer, attempt: Callable[[], Any]) -> None:
        """Make an optimizer's state before the first step, by ``attempt``, which leaves nothing where it fails. No
        micro-batch would change what it needs.

        Raises:
            OutOfMemoryExhausted: it does not fit beside the weights and their gradients.
        """
        if self._start is None:
            attempt()
            return
        while (failure := self._tried(attempt)[1]) is not None:
            self._free(failure)
            if not (self._steps_one_by_one(optimizer) or self._has_stepped_down(of_held=True)):
                where = (
                    f"before step {self.step + 1}, where the optimizer makes its state (as large with any micro-batch),"
                )
                raise self._exhausted(failure, where)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        attempt: Callable[[], bool],
        scaler_state: Callable[[], Sequence[Tensor]] = tuple,
    ) -> bool:
        """Call an optimizer's step around `gradients`; whether ``attempt`` gave True, on one of the ranks.

        Weights, gradients and states are of one size with any micro-batch. So first the step is made to need less
        itself, then what else lies in memory goes, and the micro-batch is halved only as long as that leaves more room:
        of blocks that passes have left in pieces, of what a model keeps of its activations.

        Of several ranks, one that had no memory for the step takes over what came of it on another one.

        Args:
            scaler_state: what a step changes besides weights and the optimizer's states.

        Raises:
            OutOfMemoryExhausted: nothing is left to change.
            RestartNeeded: the step had changed some weights or states when memory ran out: to do it again would not
                give the weights that it should.
        """
        if self._start is None:
            return attempt()
        least_bytes: int | None = None
        while True:
            before = BeforeStep(optimizer)
            is_so, failure = self._tried(attempt, in_optimizer=True)
            if failure is None:
                return bool(is_so)
            has_stepped = is_so is not None
            if self._ranks.take_step_of_another(optimizer, scaler_state(), has_stepped):
                oom.release()
                self._on_event("oom", step=self.step, message=failure.message)
                self._start.is_taken = False  # the step is over
                if self._steps_one_by_one(optimizer) or self._has_stepped_down(of_held=True):
                    return False
                if self._has_stepped_down():
                    return False
                raise self._exhausted(failure, f"in the optimizer's step {self.step},")
            if self._ranks.any(has_stepped or not before.is_as_it_was()):
                self._free(failure)
                message = (
                    f"Out of memory in the optimizer's step {self.step}, which was applied in part: {failure.message} "
                    f"{self._way_out(failure.kind)}"
                )
                if not self._may_adapt:
                    raise self._ended(OutOfMemoryExhausted(message, failure.kind), failure)
                self._steps_one_by_one(optimizer)
                changes = {} if self._ladder is None else self._ladder.changes()
                raise self._ended(RestartNeeded(message, changes, failure.kind), failure)
            oom.release()
            left_bytes = oom.reserved_bytes()
            self._free(failure)
            if self._steps_one_by_one(optimizer) or self._has_stepped_down(of_held=True):
                continue
            has_no_more = self._ranks.any(least_bytes is not None and left_bytes >= least_bytes)
            if has_no_more or not self._has_stepped_down():
                raise self._exhausted(failure, f"in the optimizer's step {self.step},")
            least_bytes = left_bytes

    def go_down_without_failure(self) -> None:
        """Take the ladder's next step between two steps, if there is one."""
        changed = None if self._ladder is None else self._ladder.step_down()
        if changed is not None:
            oom.release()
            self._tell(changed)

    def _tried(self, attempt: Callable[[], Any], *, in_optimizer: bool = False) -> tuple[Any, oom.MemoryFailure | None]:
        """What this rank's attempt gave, of which a True counts for all, and the failure of this one or another."""
        try:
            result, failure = self._attempts(attempt)
        except OtherRankFailed as other:  # and has told so
            if other.in_optimizer and not in_optimizer:
                raise
            return None, _OF_ANOTHER
        has_failed, is_so = self._ranks.agree(failure is not None, result is True, in_optimizer=in_optimizer)
        failure = _OF_ANOTHER if has_failed and failure is None else failure
        return is_so if isinstance(result, bool) else result, failure

    def _from_start(self, attempt: Callable[[], Result]) -> Result:
        if self._start is not None and not self._start.is_taken:
            self._start.take()
        return attempt()

    def _steps_one_by_one(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer does so from now on, and did not before."""
        if not (self._may_adapt and one_weight_at_a_time(optimizer)):
            return False
        change = f"{FOREACH}=false"
        if self._ladder is not None:
            self._ladder.note(change)
        self._go_on_with({"change": change})
        return True

    def _has_stepped_down(self, *, of_held: bool = False) -> bool:
        if self._ladder is None or self._start is None or not self._may_adapt:
            return False
        changed = self._ladder.step_down(of_held=of_held)
        if not self._ranks.any(changed is not None):
            return False
        self._go_on_with(changed)
        return True

    def _go_on_with(self, changed: dict[str, Any] | None) -> None:
        """None: it is another rank that has changed something."""
        assert self._start is not None
        if changed is not None:
            self._tell(changed)
        self._start.restore()

    def _exhausted(self, failure: oom.MemoryFailure, where: str = "") -> OutOfMemoryExhausted:
        assert self._ladder is not None
        message = (
            f"Out of memory {f'{where} ' if where else ''}with {self._ladder.tried()}: {failure.message} "
            f"{self._way_out(failure.kind)}"
        )
        return self._ended(OutOfMemoryExhausted(message, failure.kind), failure)

    def _ended(self, error: OutOfMemoryExhausted, failure: oom.MemoryFailure) -> OutOfMemoryExhausted:
        """The error that ends training; the rank whose memory it was tells why."""
        error.is_of_other_rank = failure is _OF_ANOTHER
        return error

    def _free(self, failure: oom.MemoryFailure) -> None:
        self._forget()
        oom.release()
        self._on_event("oom", step=self.step, message=failure.message)

    def _tell(self, changed: dict[str, Any]) -> None:
        self._on_event("step_down" if "micro_batch" in changed else "ladder", step=self.step, **changed)
        self.has_retried = True
