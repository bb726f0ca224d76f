"""Coordinates the ranks of one run: data prepared in turn, rank 0's plan, the GPUs of all machines, one outcome."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from wellfed.errors import EXIT_NOTHING_RUN
from wellfed.plan.run_plan import LoaderSection, MemorySection, RunPlan
from wellfed.run.folder.run_folder import keep_log_of_rank
from wellfed.run.outcome import Outcome
from wellfed.run.ranks.exchange import Exchange
from wellfed.run.ranks.following import SharedRun, invite, uninvite

if TYPE_CHECKING:
    from wellfed.run.planner import Planner


@dataclass(frozen=True)
class PlanOfRank0:
    """Parts of a plan that rank 0 decides for all ranks."""

    budget_gib: float | None
    """Rank 0's reading, since earlier ranks hold some memory of the card when a later rank reads it."""
    memory: MemorySection
    """Ranks that split a step differently would not meet in the same collectives."""
    loader: LoaderSection
    """Rank 0 has measured the free host memory for all ranks."""


class OtherRanks:
    """Cooperation of this rank with the others of its run; a single rank does nothing here.

    Args:
        shared: the run as rank 0 has composed it.
        exchange: connection to ranks that already run. Lightning starts the other ranks of a machine when rank 0 begins
            to train; `plan` opens it before.
    """

    def __init__(self, rank: int = 0, shared: SharedRun | None = None, exchange: Exchange | None = None) -> None:
        self._rank, self._shared, self.exchange = rank, shared, exchange
        self._has_invited = False

    @property
    def is_shown_by_rank_0(self) -> bool:
        """Whether rank 0 shows how this rank has ended.

        False for a rank that Lightning has started: rank 0 may wait for it in torch, and show nothing.
        """
        return self._together is not None

    @property
    def _together(self) -> Exchange | None:
        """The exchange, if all ranks were started at once, so that they can take turns before training."""
        return None if self.exchange is None or self.exchange.launch.by == "Lightning" else self.exchange

    def share(self) -> None:
        """Sends the run to ranks that already run, and wait for it."""
        if self.exchange is not None and self._rank == 0:
            self.exchange.broadcast("run", self._shared)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Orders the ranks within the block, which prepares data: rank 0, then the first rank of each machine, then the
        rest.

        So data that are prepared once are there for all, on a shared disk and on each machine's own disk.

        Raises:
            RankEnded: an earlier rank has ended.
        """
        exchange = self._together
        if exchange is None:
            yield
            return
        launch = exchange.launch
        if launch.rank > 0:
            exchange.broadcast("first is prepared")
        if not launch.is_first_of_node:
            exchange.gather("prepared", None)
            exchange.broadcast("all are prepared")
        yield
        if launch.rank == 0:
            exchange.broadcast("first is prepared")
        if launch.is_first_of_node:
            exchange.gather("prepared", None)
            exchange.broadcast("all are prepared")

    def plan(self, planner: Planner) -> RunPlan:
        """Returns the plan of training, with rank 0's decisions."""
        if self._rank > 0 and self.exchange is not None:
            decided: PlanOfRank0 = self.exchange.broadcast("plan")
            device = replace(planner.device.device, memory_gib=decided.budget_gib)
            rough = replace(planner, device=replace(planner.device, device=device)).rough()
            return replace(rough, memory=decided.memory, loader=decided.loader)
        plan = planner.for_training(self._rank)
        if self._rank == 0 and plan.trainer.world_size > 1:
            if self.exchange is None and self._shared is not None:
                self.exchange = invite(self._shared, plan.trainer.world_size)
                self._has_invited = True
            if self.exchange is not None:
                budget_gib = plan.device.memory_gib
                self.exchange.broadcast("plan", PlanOfRank0(budget_gib, plan.memory, plan.loader))
        return plan

    def ready(self) -> None:
        """Waits until all ranks are about to meet in a collective of torch; raises RankEnded if one has failed."""
        if self._together is not None:
            self._together.all_gather("ready", None)

    def all_gather(self, kind: str, own: Any) -> list[Any]:
        """Returns the objects of all ranks, in their order, on all of them; raises RankEnded if one has failed."""
        return [own] if self.exchange is None else self.exchange.all_gather(kind, own)

    def met(self) -> None:
        """Removes the invitation once all ranks that Lightning starts have joined. Some stages begin before that."""
        if self._has_invited and self.exchange is not None and not self.exchange.missing():
            uninvite()

    def outcome(self, own: Outcome) -> Outcome:
        """Returns how the run has ended, and reports it to the other ranks. On rank 0 this is the end of the rank that
        failed first. Other ranks report only their own."""
        exchange = self.exchange
        if exchange is None:
            return own
        if self._rank > 0:
            if self._shared is not None and not (own.is_of_other_rank or own.is_refusal or own.status == "interrupted"):
                keep_log_of_rank(self._shared.folder, self._rank)
        elif not own.is_expected or own.is_of_other_rank or own.status == "interrupted":  # by torchrun, perhaps
            own = self._explained(own, exchange.reason(own))
        exchange.report(own)
        if exchange.launch.by == "Lightning" and own.exit_code and self._rank > 0:
            _leave_collectives()
        return own

    def close(self, exit_code: int) -> None:
        """Ends an exchange that was opened for ranks that Lightning has started."""
        if self._has_invited and self.exchange is not None:
            self.exchange.close(Outcome("ok" if exit_code == 0 else "failed", exit_code))
            uninvite()

    def _explained(self, own: Outcome, found: Outcome | None) -> Outcome:
        if found is None or (own.message and found.message.endswith(own.message)):  # the same error on all ranks
            return own
        is_counted = found.is_refusal or not own.is_refusal
        code = found.exit_code if is_counted else EXIT_NOTHING_RUN
        logs = [] if self._shared is None or found.is_refusal else sorted(self._shared.folder.glob("train.rank*.log"))
        advice = f"{found.advice} Its log is {', '.join(map(str, logs))}.".lstrip() if logs else found.advice
        # The other rank showed its traceback. The one here is of a broken connection.
        return replace(found, is_expected=True, exit_code=code, advice=advice)


def _leave_collectives() -> None:
    """Breaks the connections of Gloo, so that ranks waiting for this one fail at once."""
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
