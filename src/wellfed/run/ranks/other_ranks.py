"""Tells the ranks of one run what rank 0 has decided, and rank 0 how another has ended.

Lightning starts the other ranks of a machine when rank 0 begins to train. It hands them the environment and the
command line of rank 0 and nothing else: so these two carry what a rank can't find out by itself. To ranks that torchrun
or srun has started it goes over a `Line`.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from wellfed.command_line import set_words, words
from wellfed.config.entry import where_flags
from wellfed.errors import EXIT_NOTHING_RUN, ConfigError
from wellfed.observe.hardware.facts import MachineFacts
from wellfed.plan.nodes import NodeCards, card_faults
from wellfed.plan.run_plan import DevicePlan, LoaderSection, MemorySection, PlannedStage, RunPlan
from wellfed.record import write_atomically
from wellfed.run.ending import Outcome
from wellfed.run.folder.run_folder import RUN_FOLDER
from wellfed.run.planner import Planner
from wellfed.run.ranks.line import Line
from wellfed.train.memory.remembered import Lowered

_TOLD = "WELLFED_RANK_0"
"""Environment variable: `RankZero`, pickled, in hexadecimal digits."""
WAIT_S = 5.0
"""A rank's connections may break before it has said why."""


@dataclass(frozen=True)
class RankZero:
    """What rank 0 has decided for the others."""

    folder: Path
    """Of the run."""
    budget_gib: float | None
    """By the time a later rank looks, the card is held by those that came before."""
    memory: MemorySection
    """Ranks that split a step into other parts would not meet in the same collectives."""
    loader: LoaderSection
    """Rank 0 alone has seen what host memory was free for all of them."""
    stages: tuple[PlannedStage, ...] = ()
    """As for ``memory``."""
    remembered: Mapping[str, Lowered] = field(default_factory=dict)
    """What earlier runs had to lower: the optimizer goes by it."""

    @classmethod
    def told(cls) -> Self | None:
        """On another rank; None where Lightning has not started it."""
        told = os.environ.get(_TOLD)
        return None if told is None else pickle.loads(bytes.fromhex(told))

    def tell(self, overrides: Sequence[str]) -> None:
        """On rank 0, before the others are started; ``overrides``: ``resume=auto`` must mean the same run there."""
        os.environ[_TOLD], os.environ[RUN_FOLDER] = pickle.dumps(self).hex(), str(self.folder)
        set_words([*where_flags(words()), *overrides])


class OtherRanks:
    """What this rank has in common with the others of its run.

    Args:
        folder: this rank's own; of rank 0 that of the run.
        line: to those that torchrun or srun has started.
    """

    def __init__(self, rank: int, folder: Path, line: Line | None = None) -> None:
        self._rank, self._folder, self.line = rank, folder, line
        self._rank_0 = RankZero.told() if rank > 0 else None
        self._folder_of_rank_0 = None if self._rank_0 is None else self._rank_0.folder
        """Known at the start where rank 0 has started this one, else once the ranks have met."""
        self.rank_0_tells = False
        """How this rank has ended."""

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within it data are prepared: by rank 0, then by the first rank of each other machine, then by the others.

        So what is prepared once is there for all: on a disk that machines share rank 0's, else each machine's own.

        Raises:
            RankEnded: one whose turn was before has ended.
        """
        if self.line is None:  # Lightning starts the others when this one begins to train
            yield
            return
        line, launch = self.line, self.line.launch
        if launch.rank > 0:
            line.hear("first is prepared")
        if not launch.is_first_of_node:
            line.gather("prepared", None)
            line.hear("all are prepared")
        yield
        if launch.rank == 0:
            line.tell("first is prepared")
        if launch.is_first_of_node:
            line.gather("prepared", None)
        if launch.rank == 0:
            line.tell("all are prepared")

    def plan(self, planner: Planner, overrides: Sequence[str]) -> RunPlan:
        """The plan of training, with what is rank 0's to decide as it has decided."""
        if self.line is not None and self._rank > 0:
            self._rank_0 = self.line.hear("plan")
        if self._rank_0 is not None:
            device = replace(planner.device.device, memory_gib=self._rank_0.budget_gib)
            planner = replace(planner, device=replace(planner.device, device=device))
            told = {name: getattr(self._rank_0, name) for name in ("memory", "loader", "stages", "remembered")}
            return replace(planner.rough(), **told)
        plan = planner.for_training(self._rank)
        if self._rank == 0 and plan.trainer.world_size > 1:
            folder, budget_gib = self._folder.resolve(), plan.device.memory_gib
            decided = RankZero(folder, budget_gib, plan.memory, plan.loader, plan.stages, plan.remembered)
            if self.line is None:
                decided.tell(overrides)
            else:
                self.line.tell("plan", decided)
        return plan

    def machines(self, facts: MachineFacts, device: DevicePlan) -> list[NodeGpus]:
        """On rank 0 the GPUs of the other machines, once they are known to be as those of this one.

        Raises:
            ConfigError: they are not.
            RankEnded: a rank has found out by itself.
        """
        if self.line is None:
            return []
        launch, on_gpu = self.line.launch, device.on_gpu
        used = facts.training_gpus[: device.trainer.devices] if on_gpu else ()
        cards = tuple((gpu.name, gpu.memory_gib) for gpu in used)
        own = NodeCards(launch.node, socket.gethostname(), device.trainer.accelerator, cards)
        told = self.line.gather("cards", (own, [asdict(gpu) for gpu in facts.gpus] if launch.is_first_of_node else []))
        if not told:  # rank 0 has heard it
            return []
        if faults := list(card_faults([node for node, _ in told])):
            raise ConfigError(faults)
        others = [(node, gpus) for node, gpus in told if node.node != launch.node and gpus]
        return [NodeGpus(node.node, node.host, gpus) for node, gpus in others]

    def ready(self) -> None:
        """All ranks have come so far that the next they do is to meet by torch; raises RankEnded where one has not."""
        if self.line is None:
            return
        self.line.gather("ready", None)
        self.line.tell("go") if self._rank == 0 else self.line.hear("go")

    def watching(self, on_lost: Callable[[Outcome], None]) -> AbstractContextManager[None]:
        """Within it a rank that is gone ends this one, by force where it hangs; ``on_lost`` is called before that."""
        return nullcontext() if self.line is None else self.line.watching(on_lost)

    def meet(self) -> None:
        """All ranks begin to train: a collective. From here on all know rank 0's folder, whoever started them."""
        if dist.is_available() and dist.is_initialized():
            told = [str(self._folder.resolve())]
            dist.broadcast_object_list(told)
            self._folder_of_rank_0 = Path(told[0])

    def all_gather(self, kind: str, own: Any) -> list[Any]:
        """Returns what each rank gave, in the order of ranks; all must call it."""
        if not (dist.is_available() and dist.is_initialized()):
            return [own]
        given: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(given, own)
        return given

    def reason(self, outcome: Outcome) -> Outcome:
        """Rank 0 takes the reason of a rank that ended before it; the others leave theirs."""
        if self.line is not None:
            return self._reason_by_line(self.line, outcome)
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

    def _reason_by_line(self, line: Line, outcome: Outcome) -> Outcome:
        if self._rank > 0:
            self.rank_0_tells = not line.is_broken
        else:
            is_stopped = outcome.status == "interrupted"  # by torchrun, perhaps, because a rank had ended
            if not outcome.is_expected or outcome.is_of_other_rank or is_stopped:
                found = line.reason(wait_s=0 if is_stopped else WAIT_S)
                if found is not None and not (is_stopped and found.status == "interrupted"):
                    is_own = found.is_refusal or not outcome.is_refusal
                    code = found.exit_code if is_own else EXIT_NOTHING_RUN
                    outcome = replace(found, is_expected=True, exit_code=code)
        line.end(outcome)
        return outcome


@dataclass(frozen=True)
class NodeGpus:
    """Another machine's, as its ``gpus`` in the record has them."""

    node: int
    host: str
    gpus: list[dict[str, Any]]


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
