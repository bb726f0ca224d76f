"""Finds the rank that all others wait for, and what it spends the time on.

Ranks that average gradients step together: a mean step takes the same time T on each rank. T is the sum of a rank's own
work W and of the part S in which it waits for other ranks: T = W + S. So the rank with the most own work waits least,
and each other rank waits for it by the difference of their W. All parts are timed on each rank anyway, and nothing is
synchronised.

A pause of one rank alone, such as a validation on rank 0, is part of none of its steps. The others may wait for it
between theirs, so that their T and W are longer. This is no work that rank 0 waits for, so the difference of T is
subtracted.

- With DDP, S is the backward pass, in which gradients are averaged, and what belongs to no phase, in which ranks agree
  on a flag (``memory.on_oom=retry``). W is the rest: wait for data, copy, forward pass, optimizer, host.
- DDP sends rank 0's buffers in the forward pass, in which others may wait for rank 0. SyncBatchNorm exchanges there,
  too. So ranks are also compared by wait, copy and host alone.
- FSDP gathers weights in the forward pass, too. There wait, copy and host are the only own work that is seen, beside
  the optimizer, which confirms a slow card.

The straggler's own backward pass can't be told from S. If its forward pass takes longer than that of others, its
backward pass is assumed to take longer by up to the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence, host_of
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.ranks.rank_troubles import (
    MachineTrouble,
    Trouble,
    card_trouble,
    clock_mhz,
    machine_trouble,
)
from wellfed.record import RankEntry
from wellfed.units import show_ms

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
"""Ids of their findings."""
_NAMES: dict[Part, str] = {
    **{"wait": "waiting for data", "copy": "copy to the GPU", "host": "time between two steps"},
    **{"forward": "forward pass", "optimizer": "optimizer", "compute": "computing"},
}
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
    where = f"on {host}" if gpu is None else f"GPU {gpu.rpartition('/')[2]} of {host}"
    return f"rank {rank['rank']} ({where})"


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, beside a typical other rank."""

    rank: RankEntry
    typical: RankEntry
    num_ranks: int
    alike: tuple[int, ...]
    """Numbers of other ranks that are nearly as slow."""
    part: Part
    """Part of the step with most of its excess; ``compute`` = known by its figures alone."""
    step_ms: float
    lost_ms: float
    """Milliseconds of a step that it costs: so much longer does the next rank wait for others."""
    half_ms: float
    """Half the 95 % interval of that difference."""
    hidden_ms: float = 0.0
    """Most that its longer backward pass may cost beside that."""
    known_cause: Cause | None = None
    """Cause by which it was found, if its time was not."""

    def ms(self, part: str) -> tuple[float, float]:
        """Returns the milliseconds of a part on this rank and on the typical one."""
        return ms_of(self.rank, part), ms_of(self.typical, part)

    @property
    def longer(self) -> float:
        """How many times as long its part takes as on the typical rank; 1 if that was not timed."""
        slow_ms, usual_ms = self.ms(self.part)
        return 1.0 if self.part == "compute" else slow_ms / usual_ms if usual_ms > 0 else math.inf

    def compared(self) -> str:
        """Returns the time of the part on both ranks, as a clause."""
        slow_ms, usual_ms = map(show_ms, self.ms(self.part))
        return f"its {_NAMES[self.part]} takes {slow_ms} of a step, that of rank {self.typical['rank']} {usual_ms}"

    @property
    def gain(self) -> Gain:
        """Predicted gain if the straggler and ranks like it were like the others."""
        low, mid, high = (
            self.step_ms / max(self.step_ms - lost_ms, 0.02 * self.step_ms)
            for lost_ms in (
                max(0.0, self.lost_ms - self.half_ms),
                self.lost_ms + self.hidden_ms / 2,
                self.lost_ms + self.hidden_ms + self.half_ms,
            )
        )
        return Gain(mid, min(low, mid), max(mid, high))

    @property
    def figures(self) -> Figures:
        """Figures of any finding about it."""
        found: Figures = {"rank": self.rank["rank"], "typical_rank": self.typical["rank"], "part": self.part}
        found |= {"host": self.rank.get("host", ""), "gpu": self.rank["gpu"] or ""}
        return found | {"step_ms": self.step_ms, "lost_ms": self.lost_ms}

    def finding(self, cause: Cause, what: str, figures: Figures, change: tuple[str, ...] = ()) -> Finding:
        """Returns the finding: who waits for whom, what this rank does, and the gain if it were like the others."""
        waiting = f"Rank {self.typical['rank']} waits" if self.num_ranks == 2 else "All other ranks wait"
        text = f"{waiting} for {named_rank(self.rank)}: {what}."
        if self.alike:
            more = f" and {len(self.alike) - _MOST_NAMED} more" if len(self.alike) > _MOST_NAMED else ""
            numbers = ", ".join(map(str, self.alike[:_MOST_NAMED]))
            text += f" Nearly as slow: rank{'s' if len(self.alike) > 1 else ''} {numbers}{more}."
        return Finding(cause, text, self.figures | figures, change, gain=self.gain)


def compared_ranks(evidence: Evidence) -> list[RankEntry]:
    """Returns the ranks that step together and have enough steps; empty without at least two."""
    ranks = [
        one
        for one in evidence.record.ranks
        if one["step_ms_mean"] > 0 and one.get("steps", limits.FEWEST_STEPS) >= limits.FEWEST_STEPS
    ]
    if len({one.get("parameter_values") for one in ranks}) > 1:
        return []  # parts of a model, which receive from one another in their forward passes
    steps_ms = [one["step_ms_mean"] for one in ranks]
    if len(ranks) < 2 or max(steps_ms) - min(steps_ms) > limits.APART_FRAC * median(steps_ms):
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
        return _behind(ranks, _BETWEEN) or _by_its_figures(evidence, ranks)
    found = _behind(ranks, (*_BETWEEN, *_PHASES)) or _behind(ranks, _BETWEEN)
    # A card that gets hot in the first steps makes the interval of all steps wide.
    seen = None if found is not None else _by_its_figures(evidence, ranks)
    return seen if seen is not None and seen.known_cause == "slow_gpu" else found


def _behind(ranks: Sequence[RankEntry], parts: Sequence[Part]) -> Straggler | None:
    """Returns the rank with the most own work in these parts."""
    work_ms = [sum(ms_of(one, part) for part in parts) for one in ranks]
    top, is_slow = _slowest(ranks, work_ms)
    if top is None:
        return None
    rest = sorted((index for index, is_alike in enumerate(is_slow) if not is_alike), key=work_ms.__getitem__)
    slow, nearest, typical = ranks[top], ranks[rest[-1]], ranks[rest[len(rest) // 2]]
    step_ms, lost_ms = median(one["step_ms_mean"] for one in ranks), work_ms[top] - work_ms[rest[-1]]
    excess_ms = {part: ms_of(slow, part) - ms_of(typical, part) for part in parts}
    part = max(parts, key=excess_ms.__getitem__)
    longer_ms = min(slow["step_ms_mean"] - nearest["step_ms_mean"], ms_of(slow, "host") - ms_of(nearest, "host"))
    lost_ms -= max(0.0, longer_ms)
    half_ms = _half_width(slow, nearest, "work_half_ms" if "forward" in parts else "between_half_ms")
    least_ms = max(limits.HOST_FRAC * step_ms, limits.HOST_MS) if part == "host" else limits.STRAGGLER_FRAC * step_ms
    if half_ms is None or lost_ms < max(least_ms, half_ms):
        return None
    hidden_ms = 0.0
    if part == "forward":
        backward_ms = ms_of(slow, "backward") * max(0.0, excess_ms[part] / ms_of(slow, part))
        hidden_ms = min(backward_ms, limits.BACKWARD_FACTOR * excess_ms[part])
    alike = tuple(one["rank"] for one, is_alike in zip(ranks, is_slow, strict=True) if is_alike and one is not slow)
    return Straggler(slow, typical, len(ranks), alike, part, step_ms, lost_ms, half_ms, hidden_ms)


def _slowest(ranks: Sequence[RankEntry], values: Sequence[float]) -> tuple[int | None, list[bool]]:
    """Returns the index of the rank with the largest value, and which ranks are nearly as slow.

    The index is None if most ranks are, or half of more than two that share a machine with others: then it is unknown
    which of them are the exception.
    """
    quick = median(sorted(values)[: max(1, len(values) // 2)])
    top = max(range(len(values)), key=values.__getitem__)
    is_slow = [value - quick > _ALIKE_FRAC * (values[top] - quick) for value in values]
    hosts = [{host_of(one) for one, slow in zip(ranks, is_slow, strict=True) if slow == kind} for kind in (True, False)]
    most = len(ranks) if len(ranks) == 2 or hosts[0].isdisjoint(hosts[1]) else len(ranks) - 1
    return top if 0 < 2 * sum(is_slow) <= most else None, is_slow


def _half_width(one: RankEntry, other: RankEntry, name: str) -> float | None:
    """Returns half the interval of the difference of two ranks; None if that of one is unknown."""
    halves = [rank.get(name) for rank in (one, other)]
    known = [half for half in halves if isinstance(half, float | int)]
    return math.hypot(*known) if len(known) == len(halves) else None


def _by_its_figures(evidence: Evidence, ranks: Sequence[RankEntry]) -> Straggler | None:
    """Returns the rank with a slow card or large batches, where its compute time contains waiting.

    The clock of a card counts if the phases in which a rank waits for no other one take longer, too. Bytes of batches
    count beyond their interval.
    """
    clocks = [clock_mhz(evidence, one) for one in ranks]
    top, typical, factor = _above_others(ranks, [1 / clock if clock else 0.0 for clock in clocks])
    own = _PHASES if has_phases(evidence, ranks) else ("optimizer",)
    longer = min(_times_as_long(ranks, top, part) for part in own)
    if limits.CLOCK_FRAC * factor > 1 and longer - 1 >= limits.EXPLAINED_FACTOR * (factor - 1):
        return _by_factor(len(ranks), top, typical, factor, "slow_gpu")
    top, typical, factor = _above_others(ranks, [one.get("samples") or 0.0 for one in ranks])
    if factor < limits.UNEVEN_FACTOR_OF_RANKS:
        sizes_mib = [one.get("batch_mib") or 0.0 for one in ranks]
        top, typical, factor = _above_others(ranks, sizes_mib)
        if _half_width(top, typical, "batch_half_mib") is None or share_factor(top, typical) == 1.0:
            return None
    is_uneven = factor >= limits.UNEVEN_FACTOR_OF_RANKS
    return _by_factor(len(ranks), top, typical, factor, "uneven_shares") if is_uneven else None


def _times_as_long(ranks: Sequence[RankEntry], rank: RankEntry, part: Part) -> float:
    """Returns the time of a part of a rank's step over that of the others; 1 if theirs is unknown."""
    usual_ms = median(ms_of(one, part) for one in ranks if one is not rank)
    return ms_of(rank, part) / usual_ms if usual_ms > 0 else 1.0


def _above_others(ranks: Sequence[RankEntry], values: Sequence[float]) -> tuple[RankEntry, RankEntry, float]:
    """Returns the rank with the largest value, the middle one of the others, and the factor between them; 1 if several
    ranks are as large."""
    slowest, _ = _slowest(ranks, values)
    *others, top = sorted(range(len(ranks)), key=values.__getitem__)
    typical = others[(len(others) - 1) // 2]
    factor = 1.0 if slowest is None or not values[typical] else values[top] / values[typical]
    return ranks[top], ranks[typical], factor


def _by_factor(num: int, rank: RankEntry, typical: RankEntry, factor: float, cause: Cause) -> Straggler | None:
    """Returns a straggler whose computing takes up to this factor longer."""
    step_ms, most_ms = rank["step_ms_mean"], ms_of(rank, "compute") * (1 - 1 / factor)
    if most_ms < limits.STRAGGLER_FRAC * step_ms:
        return None
    return Straggler(rank, typical, num, (), "compute", step_ms, most_ms / 2, most_ms / 2, known_cause=cause)


def cause_of(evidence: Evidence, found: Straggler) -> Cause:
    """Returns why the straggler is slow: its share of the data, its card, its machine, else the part of its step."""
    if found.known_cause is not None:
        return found.known_cause
    if _is_share(found):
        return "uneven_shares"
    if found.part in _PHASES and card_of(evidence, found):
        return "slow_gpu"
    if found.part != "copy" and machine_of(evidence, found):
        return "slow_machine"
    return _OF_PART.get(found.part, "compute_straggler")


def card_of(evidence: Evidence, found: Straggler) -> Trouble | None:
    """Returns what slows the card of the straggler."""
    return card_trouble(evidence, found.rank, found.typical, longer=found.longer)


def machine_of(evidence: Evidence, found: Straggler) -> MachineTrouble | None:
    """Returns what the straggler lacks on its machine."""
    return machine_trouble(
        evidence,
        found.rank,
        found.typical,
        lost_frac=found.lost_ms / found.step_ms,
        is_loading=found.part == "wait",
    )


def share_factor(rank: RankEntry, other: RankEntry) -> float:
    """Returns how much larger a rank's batches are than another's, by samples or bytes; 1 if they are not. Bytes are
    those of some batches, so they count beyond their interval."""
    samples, usual = rank.get("samples") or 0.0, other.get("samples") or 0.0
    mib, usual_mib = rank.get("batch_mib") or 0.0, other.get("batch_mib") or 0.0
    half_mib = _half_width(rank, other, "batch_half_mib")
    if half_mib is not None and mib - usual_mib <= half_mib:
        mib = usual_mib
    factors = [more / fewer for more, fewer in ((samples, usual), (mib, usual_mib)) if more and fewer]
    factor = max(factors, default=1.0)
    return factor if factor >= limits.UNEVEN_FACTOR_OF_RANKS else 1.0


def _is_share(found: Straggler) -> bool:
    """Returns whether the size of its batches explains the excess of the straggler."""
    factor = share_factor(found.rank, found.typical)
    slow_ms, usual_ms = found.ms(found.part)
    if found.part == "wait":
        slow_ms, usual_ms = found.rank.get("build_ms") or 0.0, found.typical.get("build_ms") or 0.0
    if factor == 1 or found.part in ("host", "optimizer"):
        return False
    longer = slow_ms / usual_ms if usual_ms > 0 else factor
    return factor - 1 >= limits.EXPLAINED_FACTOR * (longer - 1)
