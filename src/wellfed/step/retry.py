"""Does a training step again, in a way that needs less memory, where memory did not suffice for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from wellfed.errors import OutOfMemoryExhausted
from wellfed.memory import oom
from wellfed.memory.ladder import Ladder
from wellfed.memory.optimizer_state import one_weight_at_a_time, versions
from wellfed.memory.step_start import StepStart
from wellfed.record import OnEvent
from wellfed.step.ranks import Ranks

Result = TypeVar("Result")


class StepRetry:
    """Calls a step until it fits; each failure takes the ladder's next way of needing less.

    Args:
        ladder: None = errors of memory pass as they are.
        start: None = nothing is done again, a failure ends the run.
        forget: lets go of what a failed step has left: gradients, sums.
        way_out: ends an error: what holds the memory, and what else can be done.
        may_adapt: False = the first failure ends the run, whatever is left of the ladder.
    """

    def __init__(
        self,
        ladder: Ladder | None,
        start: StepStart | None,
        *,
        forget: Callable[[], None],
        way_out: Callable[[], str],
        on_event: OnEvent,
        ranks: Ranks | None = None,
        may_adapt: bool = True,
    ) -> None:
        self._ladder, self._start, self._may_adapt = ladder, start, may_adapt
        self._ranks = ranks if ranks is not None and ranks.retries_together else None
        self._tried: Callable[[Callable[[], Any]], tuple[Any, oom.MemoryFailure | None]] = oom.attempted
        if self._ranks is not None:
            self._tried = partial(self._tried_by_all, self._ranks)
        self._forget, self._way_out, self._on_event = forget, way_out, on_event
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
            self._start.take()
        while True:
            result, failure = self._tried(attempt)
            if failure is None:
                return result  # type: ignore[no-any-return]
            del result
            self._go_down(failure)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, attempt: Callable[[], Any]) -> None:
        """Call an optimizer's step around `gradients`.

        Raises:
            OutOfMemoryExhausted: nothing is left to change, or the step had changed some weights or states when memory
                ran out: to do it again would not give the weights that it should.
        """
        if self._start is None:
            attempt()
            return
        while True:
            before = versions(optimizer)
            _, failure = self._tried(attempt)
            if failure is None:
                return
            # Of several ranks, those that did not fail have taken the step.
            if self._ranks is not None or versions(optimizer) != before:
                self._free(failure)
                raise OutOfMemoryExhausted(
                    f"Out of memory in the optimizer's step {self.step}, which was applied in part: {failure.message} "
                    f"resume=auto goes on from the last checkpoint, with less to hold in memory. {self._way_out()}"
                )
            if self._may_adapt and one_weight_at_a_time(optimizer):
                self._free(failure)
                self._tell({"change": "workload.optimizer.foreach=false"})
                self._start.restore()
            else:
                self._go_down(failure)

    def go_down_without_failure(self) -> None:
        """Take the ladder's next step between two steps, if there is one."""
        changed = None if self._ladder is None else self._ladder.step_down()
        if changed is not None:
            oom.release()
            self._tell(changed)

    @staticmethod
    def _tried_by_all(ranks: Ranks, attempt: Callable[[], Any]) -> tuple[Any, oom.MemoryFailure | None]:
        result, failure = oom.attempted(attempt)
        if ranks.any(failure is not None) and failure is None:
            failure = oom.MemoryFailure("device_oom", "another rank ran out of memory.")
        return result, failure

    def _go_down(self, failure: oom.MemoryFailure) -> None:
        assert self._ladder is not None
        self._free(failure)
        changed = self._ladder.step_down() if self._start is not None and self._may_adapt else None
        if changed is None or self._start is None:
            raise OutOfMemoryExhausted(
                f"Out of memory with {self._ladder.tried()}: {failure.message} {self._way_out()}"
            )
        self._tell(changed)
        self._start.restore()

    def _free(self, failure: oom.MemoryFailure) -> None:
        self._forget()
        oom.release()
        self._on_event("oom", step=self.step, message=failure.message)

    def _tell(self, changed: dict[str, Any]) -> None:
        self._on_event("step_down" if "micro_batch" in changed else "ladder", step=self.step, **changed)
        self.has_retried = True
