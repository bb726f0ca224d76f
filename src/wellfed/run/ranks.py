"""Tells the ranks of one run what rank 0 has decided, and rank 0 how another has ended.

Lightning starts the other ranks of a machine when rank 0 begins to train. It hands them the environment and the
command line of rank 0 and nothing else: so these two carry what a rank can't find out by itself. Ranks that torchrun or
Slurm has started go by what each of them sees.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch.distributed as dist

from wellfed.config.entry import where_flags
from wellfed.planning.run_plan import DevicePlan, LoaderSection, Reason, RunPlan
from wellfed.run.outcome import Outcome

_TOLD = "WELLFED_RANK_0"
"""Environment variable: `RankZero` as JSON."""
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
        if _TOLD not in os.environ:
            return None
        told = json.loads(os.environ[_TOLD])
        reasons = {knob: Reason(**reason) for knob, reason in told["loader"].pop("reasons").items()}
        return cls(Path(told["folder"]), told["budget_gib"], LoaderSection(reasons=reasons, **told["loader"]))

    def tell(self, overrides: Sequence[str]) -> None:
        """On rank 0, before the others are started.

        Args:
            overrides: of this run: ``resume=auto`` must mean the same one there.
        """
        told = {"folder": str(self.folder.resolve()), "budget_gib": self.budget_gib, "loader": asdict(self.loader)}
        os.environ[_TOLD] = json.dumps(told)
        sys.argv[1:] = [*where_flags(sys.argv[1:]), *overrides]

    def device(self, device: DevicePlan) -> DevicePlan:
        """The device of this rank, with rank 0's budget."""
        return replace(device, device=replace(device.device, memory_gib=self.budget_gib))

    def plan(self, plan: RunPlan) -> RunPlan:
        """The plan of this rank, with rank 0's loader."""
        return replace(plan, loader=self.loader)


def leave_for_rank_0(outcome: Outcome, folder: Path, rank: int) -> bool:
    """Another rank's end, for rank 0, which sees of it no more than a broken connection; whether it could be left."""
    path, partial = folder / f".rank{rank}.json", folder / f".rank{rank}.tmp"
    try:
        partial.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        partial.replace(path)
    except OSError:  # the folder is not on this machine, say
        return False
    return True


def told_by_rank_0(folder: Path) -> Path:
    """Rank 0's folder, on every rank: one that torchrun or Slurm has started knows it from no variable.

    A collective; ``folder`` counts on rank 0.
    """
    told = [str(folder.resolve())]
    dist.broadcast_object_list(told)
    return Path(told[0])


def take_from_ranks(folder: Path, wait_s: float = WAIT_S) -> Outcome | None:
    """The end that another rank has left here, or leaves within ``wait_s``: the reason of rank 0's own."""
    until_s = time.monotonic() + wait_s
    while not (left := sorted(folder.glob(".rank*.json"))) and time.monotonic() < until_s:
        time.sleep(0.1)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in left]
    for path in left:
        path.unlink()
    return Outcome(**found[0]) if found else None
