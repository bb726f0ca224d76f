"""Tells the ranks of one run what rank 0 has decided, and rank 0 how another has ended.

Lightning starts the other ranks of a machine when rank 0 begins to train. It hands them the environment and the
command line of rank 0 and nothing else: so these two carry what a rank can't find out by itself. Ranks that torchrun or
Slurm has started go by what each of them sees.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch.distributed as dist

from wellfed.config.entry import where_flags
from wellfed.planning.run_plan import LoaderSection, RunPlan
from wellfed.record import write_atomically
from wellfed.run.outcome import Outcome
from wellfed.run.planner import Planner

_TOLD = "WELLFED_RANK_0"
"""Environment variable: `RankZero`, pickled, in hexadecimal digits."""
WAIT_S = 5.0
"""A rank's connections may break before it has said why."""


@dataclass(frozen=True)
class RankZero:
    """What rank 0 has decided for the ranks that Lightning starts."""

    folder: Path
    """Of the run."""
    budget_gib: float | None
    """By the time a later rank looks, the card is held by those that came before."""
    loader: LoaderSection
    """Rank 0 alone has seen what host memory was free for all of them."""

    @classmethod
    def told(cls) -> Self | None:
        """On another rank; None where Lightning has not started it."""
        told = os.environ.get(_TOLD)
        return None if told is None else pickle.loads(bytes.fromhex(told))

    def tell(self, overrides: Sequence[str]) -> None:
        """On rank 0, before the others are started; ``overrides``: ``resume=auto`` must mean the same run there."""
        os.environ[_TOLD] = pickle.dumps(self).hex()
        sys.argv[1:] = [*where_flags(sys.argv[1:]), *overrides]


class OtherRanks:
    """What this rank has in common with the others of its run.

    Args:
        folder: this rank's own; of rank 0 that of the run.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self._rank_0 = RankZero.told() if rank > 0 else None
        self._folder_of_rank_0 = None if self._rank_0 is None else self._rank_0.folder
        """Known at the start where rank 0 has started this one, else once the ranks have met."""
        self.rank_0_tells = False
        """How this rank has ended."""

    def plan(self, planner: Planner, overrides: Sequence[str]) -> RunPlan:
        """The plan of training, with what is rank 0's to decide as it has decided."""
        if self._rank_0 is not None:
            device = replace(planner.device.device, memory_gib=self._rank_0.budget_gib)
            planner = replace(planner, device=replace(planner.device, device=device))
            return replace(planner.for_training(self._rank), loader=self._rank_0.loader)
        plan = planner.for_training(self._rank)
        if self._rank == 0 and plan.trainer.devices > 1:
            RankZero(self._folder.resolve(), plan.device.memory_gib, plan.loader).tell(overrides)
        return plan

    def meet(self) -> None:
        """All ranks begin to train: a collective. From here on all know rank 0's folder, whoever started them."""
        if dist.is_available() and dist.is_initialized():
            told = [str(self._folder.resolve())]
            dist.broadcast_object_list(told)
            self._folder_of_rank_0 = Path(told[0])

    def reason(self, outcome: Outcome) -> Outcome:
        """Rank 0 takes the reason of a rank that ended before it; the others leave theirs."""
        if self._rank == 0:
            is_stopped = outcome.status == "interrupted"  # by torchrun, perhaps, because a rank had ended
            if outcome.is_expected and not (outcome.is_of_other_rank or is_stopped):
                return outcome
            found = take_from_ranks(self._folder, wait_s=0 if is_stopped else WAIT_S)
            # Its traceback has been shown there; the one at hand tells of a broken connection.
            return outcome if found is None else replace(found, is_expected=True)
        if self._folder_of_rank_0 is not None and not outcome.is_of_other_rank:
            self.rank_0_tells = leave_for_rank_0(outcome, self._folder_of_rank_0, self._rank)
        return outcome


def leave_for_rank_0(outcome: Outcome, folder: Path, rank: int) -> bool:
    """Another rank's end, for rank 0, which sees of it no more than a broken connection; whether it could be left."""
    try:
        write_atomically(folder / f".rank{rank}.json", json.dumps(asdict(outcome)))
    except OSError:  # the folder is not on this machine, say
        return False
    return True


def take_from_ranks(folder: Path, wait_s: float = WAIT_S) -> Outcome | None:
    """The end that another rank has left here, or leaves within ``wait_s``: the reason of rank 0's own."""
    until_s = time.monotonic() + wait_s
    while not (left := sorted(folder.glob(".rank*.json"))) and time.monotonic() < until_s:
        time.sleep(0.1)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in left]
    for path in left:
        path.unlink()
    return Outcome(**found[0]) if found else None
