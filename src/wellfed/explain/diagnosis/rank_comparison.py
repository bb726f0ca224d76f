"""Finds the rank that all others wait for, and what it spends the time on.

Ranks that average gradients step together: a mean step takes the same time T on each rank. T is the sum of a rank's own
work W and of the part S in which it waits for other ranks: T = W + S. So the rank with the most own work waits least,
and each other rank waits for it by the difference of their W. All parts are timed on each rank anyway, and nothing is
synchronised.

- With DDP, S is the backward pass, in which gradients are averaged, and what belongs to no phase, in which ranks agree
  on a flag (``memory.on_oom=retry``). W is the rest: wait for data, copy, forward pass, optimizer, host.
- DDP sends rank 0's buffers in the forward pass, in which others may wait for rank 0. So ranks are also compared by
  wait, copy and host alone.
- FSDP gathers weights in the forward pass, too. There wait, copy and host are the only own work that is seen. A slow
  card or larger batches are recognised by their own figures.

The straggler's own backward pass can't be told from S. If its forward pass takes longer than that of others, its
backward pass is assumed to take longer by up to the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.rank_troubles import Trouble, card_trouble, clock_factor, machine_trouble
from wellfed.record import RankEntry
from wellfed.units import show_factor

Part = Literal["wait", "copy", "host", "forward", "optimizer", "compute"]
Cause = Literal[
    "input_straggler",
    "copy_straggler",
    "host_straggler",
    "compute_straggler",
    "uneven_shares",
    "slow_gpu",
    "slow_machine",
]
"""Ids of the rules that report them."""
_BETWEEN: tuple[Part, ...] = ("wait", "copy", "host")
_PHASES: tuple[Part, ...] = ("forward", "optimizer")
_OF_PART: dict[Part, Cause] = {"wait": "input_straggler", "copy": "copy_straggler", "host": "host_straggler"}
_ALIKE_FRAC = 0.5
"""Share of the straggler's excess from which another rank counts as slow, too."""
_MOST_NAMED = 4


def ms_of(rank: RankEntry, part: str) -> float:
    """Returns the mean milliseconds of a part of a rank's step; 0 if unknown."""
    share = rank.get(f"{part}_frac")
    return rank["step_ms_mean"] * share if isinstance(share, float | int) else 0.0


def named_rank(rank: RankEntry) -> str:
    """Returns a rank with its GPU and machine: ``rank 1 (GPU 1 of node-a)``."""
    gpu, host = rank["gpu"], rank.get("host") or f"node {rank['node']}"
    return f"rank {rank['rank']} (on {host})" if gpu is None else f"rank {rank['rank']} (GPU {gpu[-1:]} of {host})"


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, beside a typical other rank."""

    rank: RankEntry
    typical: RankEntry
    alike: tuple[int, ...]
    """Numbers of other ranks that are nearly as slow."""
    part: Part
    """Part of the step with most of its excess."""
    step_ms: float
    lost_ms: float
    """Milliseconds of a step that it costs, by the difference of own work."""
    half_ms: float | None
    """Half the 95 % interval of that; None if unknown."""
    hidden_ms: float
    """Most that its longer backward pass may cost beside that."""

    def ms(self, part: str) -> tuple[float, float]:
        """Returns the milliseconds of a part on this rank and on the typical one."""
        return ms_of(self.rank, part), ms_of(self.typical, part)

    @property
    def gain(self) -> Gain:
        """Predicted gain if the straggler and ranks like it were like the others."""
        half_ms = self.lost_ms if self.half_ms is None else self.half_ms
        low, mid, high = (
            self.step_ms / max(self.step_ms - lost_ms, 0.02 * self.step_ms)
            for lost_ms in (
                max(0.0, self.lost_ms - half_ms),
                self.lost_ms + self.hidden_ms / 2,
                self.lost_ms + self.hidden_ms + half_ms,
            )
        )
        return Gain(mid, min(low, mid), max(mid, high))

    def finding(self, cause: Cause, what: str, figures: Figures, change: tuple[str, ...] = ()) -> Finding:
        """Returns the finding: who waits for whom, what this rank does, and the gain if it were like the others."""
        text = f"All other ranks wait for {named_rank(self.rank)}: {what}."
        if self.alike:
            more = f" and {len(self.alike) - _MOST_NAMED} more" if len(self.alike) > _MOST_NAMED else ""
            numbers = ", ".join(map(str, self.alike[:_MOST_NAMED]))
            text += f" Nearly as slow: rank{'s' if len(self.alike) > 1 else ''} {numbers}{more}."
        gain, prospect = self.gain, ""
        if not change:
            prospect = (
                f" If it were like the others, steps would be about {show_factor(gain.factor)} times as fast "
                f"({show_factor(gain.low)} to {show_factor(gain.high)}), predicted."
            )
        found: Figures = {"rank": self.rank["rank"], "typical_rank": self.typical["rank"], "part": self.part}
        found |= {"host": self.rank.get("host", ""), "gpu": self.rank["gpu"] or ""}
        found |= {"step_ms": self.step_ms, "lost_ms": self.lost_ms, **figures}
        return Finding(cause, text + prospect, found, change, gain=gain, prospect=prospect)


def straggling(evidence: Evidence, cause: Cause) -> Straggler | None:
    """Returns the straggler of a run if this is its cause, else None."""
    found = straggler_of(evidence)
    return found if found is not None and cause_of(evidence, found) == cause else None


def compared_ranks(evidence: Evidence) -> list[RankEntry]:
    """Returns the ranks that step together and have enough steps; empty without at least two."""
    ranks = [
        one
        for one in evidence.record.ranks
        if one["step_ms_mean"] > 0 and one.get("steps", limits.FEWEST_STEPS) >= limits.FEWEST_STEPS
    ]
    steps_ms = [one["step_ms_mean"] for one in ranks]
    if len(ranks) < 2 or max(steps_ms) - min(steps_ms) > limits.APART_FRAC * float(np.median(steps_ms)):
        return []
    return ranks


def has_phases(evidence: Evidence, ranks: Sequence[RankEntry]) -> bool:
    """Returns whether the forward pass of each rank is known and is its own work."""
    is_sharded = "fsdp" in str(evidence.value("trainer.strategy"))
    return not is_sharded and all(one.get("forward_frac") is not None for one in ranks)


def waits_for_others_ms(evidence: Evidence) -> dict[int, float]:
    """Returns the milliseconds of a step for which each rank waits for the slowest one; empty if unknown."""
    ranks = compared_ranks(evidence)
    if not ranks or not has_phases(evidence, ranks):
        return {}
    work_ms = {one["rank"]: sum(ms_of(one, part) for part in (*_BETWEEN, *_PHASES)) for one in ranks}
    most_ms = max(work_ms.values())
    sync_ms = {one["rank"]: ms_of(one, "compute") - sum(ms_of(one, part) for part in _PHASES) for one in ranks}
    return {rank: min(most_ms - own_ms, max(0.0, sync_ms[rank])) for rank, own_ms in work_ms.items()}


def straggler_of(evidence: Evidence) -> Straggler | None:
    """Returns the rank that the others wait for, if that costs a good share of the step beyond noise."""
    ranks = compared_ranks(evidence)
    if not ranks:
        return None
    if not has_phases(evidence, ranks):
        return _behind(ranks, _BETWEEN) or _slower_by_its_figures(evidence, ranks)
    return _behind(ranks, (*_BETWEEN, *_PHASES)) or _behind(ranks, _BETWEEN)


def _behind(ranks: Sequence[RankEntry], parts: Sequence[Part]) -> Straggler | None:
    """Returns the rank with the most own work in these parts."""
    own_ms = np.array([[ms_of(one, part) for part in parts] for one in ranks])
    work_ms, step_ms = own_ms.sum(axis=1), float(np.median([one["step_ms_mean"] for one in ranks]))
    quick_ms = float(np.median(np.sort(work_ms)[: max(1, len(ranks) // 2)]))
    top = int(np.argmax(work_ms))
    is_slow = work_ms - quick_ms > _ALIKE_FRAC * (work_ms[top] - quick_ms)
    if not is_slow[top]:
        return None
    rest = np.flatnonzero(~is_slow)[np.argsort(work_ms[~is_slow], kind="stable")]
    nearest, typical = int(rest[-1]), int(rest[len(rest) // 2])
    lost_ms = float(work_ms[top] - work_ms[nearest])
    part = parts[int(np.argmax(own_ms[top] - own_ms[typical]))]
    halves = [_half_ms(ranks[index], has_phases="forward" in parts) for index in (top, *map(int, rest))]
    known = [half for half in halves if half is not None]
    half_ms = math.hypot(known[0], math.hypot(*known[1:]) / len(rest)) if len(known) == len(halves) else None
    is_host = part == "host"
    least_ms = max((limits.HOST_FRAC if is_host else limits.STRAGGLER_FRAC) * step_ms, half_ms or 0.0)
    if lost_ms < max(least_ms, limits.HOST_MS if is_host else 0.0):
        return None
    hidden_ms = 0.0
    if part == "forward":
        slow_ms, usual_ms = ms_of(ranks[top], "forward"), ms_of(ranks[typical], "forward")
        hidden_ms = ms_of(ranks[top], "backward") * max(0.0, 1 - usual_ms / slow_ms)
    alike = tuple(ranks[int(index)]["rank"] for index in np.flatnonzero(is_slow) if index != top)
    return Straggler(ranks[top], ranks[typical], alike, part, step_ms, lost_ms, half_ms, hidden_ms)


def _half_ms(rank: RankEntry, *, has_phases: bool) -> float | None:
    return rank.get("work_half_ms") if has_phases else rank.get("between_half_ms", rank.get("work_half_ms"))


def _slower_by_its_figures(evidence: Evidence, ranks: Sequence[RankEntry]) -> Straggler | None:
    """Returns the rank whose card is slow or whose batches are large, where its compute time contains waiting."""
    found: tuple[float, int, int] | None = None
    for index, one in enumerate(ranks):
        others = [other for other in range(len(ranks)) if other != index]
        typical = others[len(others) // 2]
        factor = max(share_factor(one, ranks[typical]), clock_factor(evidence, one, ranks[typical]))
        if factor > 1 and (found is None or factor > found[0]):
            found = factor, index, typical
    if found is None:
        return None
    factor, index, typical = found
    step_ms, compute_ms = ranks[index]["step_ms_mean"], ms_of(ranks[index], "compute")
    lost_ms = compute_ms * (1 - 1 / factor)
    if lost_ms < limits.STRAGGLER_FRAC * step_ms:
        return None
    return Straggler(ranks[index], ranks[typical], (), "compute", step_ms, lost_ms / 2, lost_ms / 2, 0.0)


def cause_of(evidence: Evidence, found: Straggler) -> Cause:
    """Returns why the straggler is slow: its share of the data, its card, its machine, else the part of its step."""
    if _is_share(found):
        return "uneven_shares"
    if found.part in ("forward", "optimizer", "compute") and card_trouble(evidence, found.rank, found.typical):
        return "slow_gpu"
    if found.part != "copy" and machine_of(evidence, found):
        return "slow_machine"
    return _OF_PART.get(found.part, "compute_straggler")


def machine_of(evidence: Evidence, found: Straggler) -> Trouble | None:
    """Returns what the straggler lacks on its machine."""
    return machine_trouble(
        evidence,
        found.rank,
        found.typical,
        lost_frac=found.lost_ms / found.step_ms,
        is_loading=found.part == "wait",
    )


def share_factor(rank: RankEntry, other: RankEntry) -> float:
    """Returns how much larger a rank's batches are than another's, by samples or bytes; 1 if they are not."""
    factors = [1.0]
    for more, fewer in ((rank.get("samples"), other.get("samples")), (rank.get("batch_mib"), other.get("batch_mib"))):
        if more and fewer and more >= limits.UNEVEN_FACTOR_OF_RANKS * fewer:
            factors.append(more / fewer)
    return max(factors)


def _is_share(found: Straggler) -> bool:
    """Returns whether the size of its batches explains the excess of the straggler."""
    factor = share_factor(found.rank, found.typical)
    slow_ms, usual_ms = found.ms(found.part)
    if found.part == "wait":
        slow_ms, usual_ms = found.rank.get("build_ms") or 0.0, found.typical.get("build_ms") or 0.0
    if factor == 1 or found.part in ("host", "optimizer"):
        return False
    longer = slow_ms / usual_ms if usual_ms > 0 else factor
    return found.part == "compute" or factor - 1 >= limits.EXPLAINED_FACTOR * (longer - 1)
