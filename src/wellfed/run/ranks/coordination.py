"""Coordinates the ranks of one run: rank 0's configuration and plan, data prepared in turn, one outcome.

Ranks that torchrun or srun has started wait for rank 0's broadcast. Lightning starts ranks when rank 0 begins to train.
These find the port of rank 0's store in their environment (`invited`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wellfed.config.compose import Composed
from wellfed.config.schema import RunConfig
from wellfed.process import die_with_parent
from wellfed.ranks import INVITATION, lightnings_launch, own_rank
from wellfed.run.folder.resume import Target
from wellfed.run.outcome import Outcome
from wellfed.run.ranks.exchange import Exchange

if TYPE_CHECKING:
    from wellfed.plan.run_plan import RunPlan
    from wellfed.run.planner import Planner


@dataclass(frozen=True)
class SharedRun:
    """The run that all ranks work on, as rank 0 has composed it."""

    composed: Composed[RunConfig]
    target: Target | None
    folder: Path


def invited() -> Exchange | None:
    """Returns the exchange in a process that Lightning has started for another rank; else None.

    This process then ends with its parent, rank 0: a collective of a GPU would wait for it.
    """
    text, rank = os.environ.get(INVITATION), own_rank()
    if text is None or rank == 0:
        return None
    die_with_parent(os.getppid())
    port, world_size = map(int, text.split("/"))
    return Exchange(lightnings_launch(rank, world_size), (["localhost"], port))


class OtherRanks:
    """Cooperation of this rank with the others of its run; a single rank does nothing here.

    Args:
        shared: the run as rank 0 has composed it.
        exchange: connection to ranks that already run. Lightning starts the other ranks of a machine when rank 0 begins
            to train; `plan` opens it before.
    """

    def __init__(self, rank: int = 0, shared: SharedRun | None = None, exchange: Exchange | None = None) -> None:
        self._rank, self._shared, self.exchange = rank, shared, exchange

    @property
    def together(self) -> Exchange | None:
        """The exchange, if all ranks were started at once: they take turns before training, and rank 0 shows how each
        has ended. It may wait in torch for a rank that Lightning has started, and show nothing."""
        return None if self.exchange is None or self.exchange.launch.by == "Lightning" else self.exchange

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Sends rank 0's run to the others, then orders the ranks within the block, which prepares data.

        Rank 0 is first, then the first rank of each machine, then the rest.

        So data that are prepared once are there for all, on a shared disk and on each machine's own disk.

        Raises:
            RankEnded: an earlier rank has ended.
        """
        exchange = self.together
        if exchange is None:
            yield
            return
        launch = exchange.launch
        own = 0 if launch.rank == 0 else 1 if launch.is_first_of_node else 2
        if launch.rank == 0:
            exchange.broadcast("run", self._shared)
        for turn in range(own):
            exchange.meet(f"the end of turn {turn}")
        yield
        for turn in range(own, 2):
            exchange.meet(f"the end of turn {turn}")

    def plan(self, planner: Planner) -> RunPlan:
        """Returns rank 0's plan of training. Ranks that split a step differently would not meet in collectives."""
        if self._rank > 0 and self.exchange is not None:
            decided: RunPlan = self.exchange.broadcast("plan")
            return decided
        plan = planner.for_training(self._rank)
        if self._rank == 0 and plan.trainer.world_size > 1:
            if self.exchange is None:  # Lightning will start the others
                self.exchange = Exchange(lightnings_launch(0, plan.trainer.world_size))
                os.environ[INVITATION] = f"{self.exchange.port}/{plan.trainer.world_size}"
                self.exchange.broadcast("run", self._shared)
            self.exchange.broadcast("plan", plan)
        return plan

    def outcome(self, own: Outcome) -> Outcome:
        """Returns how the run has ended, and reports it to the other ranks. On rank 0 this is the end of the rank that
        failed first. Other ranks report only their own."""
        exchange = self.exchange
        if exchange is None:
            return own
        if self._rank == 0 and (own.is_of_other_rank or own.status == "interrupted" or not own.is_expected):
            found = exchange.reason()  # torchrun may have interrupted this rank for it
            if found is not None and not (own.message and found.message.endswith(own.message)):  # all have the same
                own = replace(found, is_expected=True)  # that rank has shown its traceback
        exchange.report(own)
        if exchange.launch.by == "Lightning" and own.exit_code and self._rank > 0:
            _leave_collectives()
        return own

    def close(self, exit_code: int) -> None:
        """Ends an exchange that was opened for ranks that Lightning has started."""
        if self._rank == 0 and self.exchange is not None and self.together is None:
            self.exchange.close(Outcome("ok" if exit_code == 0 else "failed", exit_code))
            os.environ.pop(INVITATION, None)


def _leave_collectives() -> None:
    """Breaks the connections of Gloo, so that ranks waiting for this one fail at once."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
