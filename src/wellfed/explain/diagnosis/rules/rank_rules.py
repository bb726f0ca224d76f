"""Finds the rank that all others wait for, and the part of its step that takes longer.

Ranks that average gradients step together: a mean step takes the same time T on each rank. T is the sum of a rank's own
work W and of the part S in which it waits for other ranks: T = W + S. So the rank with the most own work waits least,
and each other rank waits for it by the difference of their W. All parts are timed on each rank anyway, and nothing is
synchronised.

A pause of one rank alone, such as a validation on rank 0, is part of none of its steps. The others may wait for it
between theirs, so that their T and W are longer. This is no work that rank 0 waits for, so the difference of T is
subtracted.

S is part of the backward pass, and of what belongs to no phase. W is the rest: wait for data, copy, forward pass,
optimizer, host. DDP sends buffers in the forward pass, and FSDP gathers weights there: then wait, copy and host are the
only own work that is seen.

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
from wellfed.explain.diagnosis.finding import Finding, Gain, found
from wellfed.explain.diagnosis.words import Figures, template
from wellfed.record.entries import RankEntry

Part = Literal["wait", "copy", "host", "forward", "optimizer", "clock"]
"""Parts of a step; ``clock``: the card is slow, wherever that costs time."""
_BETWEEN: tuple[Part, ...] = ("wait", "copy", "host")
_PHASES: tuple[Part, ...] = ("forward", "optimizer")
_ALIKE_FRAC = 0.5
"""Share of the straggler's excess from which another rank counts as slow, too."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, beside a typical other rank."""

    rank: RankEntry
    typical: RankEntry
    part: Part
    """Part of the step with most of its excess."""
    step_ms: float
    lost_ms: float
    """Milliseconds of a step that it costs: the next rank waits for others that much longer."""
    half_ms: float
    """Half the 95 % interval of that difference."""
    hidden_ms: float = 0.0
    """Most that its longer backward pass may cost beside that."""

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


def straggler(evidence: Evidence) -> Finding | None:
    """Returns a finding if all other ranks wait for one."""
    slowest = _slowest_of(evidence)
    if slowest is None:
        return None
    rank, other, part = slowest.rank, slowest.typical, slowest.part
    gpu, host = rank["gpu"], rank.get("host") or f"node {rank['node']}"
    figures: Figures = {"rank": rank["rank"], "typical_rank": other["rank"], "part": part, "host": host}
    figures |= {
        "gpu": gpu or "",
        "step_ms": slowest.step_ms,
        "lost_ms": slowest.lost_ms,
        "_part": template("straggler", "part", part) or None,
    }
    figures["_waiting"] = f"Rank {other['rank']} waits" if len(evidence.record.ranks) == 2 else "All other ranks wait"
    figures["_where"] = f"on {host}" if gpu is None else f"GPU {gpu.rpartition('/')[2]} of {host}"
    figures |= {"_slow_ms": ms_of(rank, part), "_usual_ms": ms_of(other, part)}
    case, of_cause = _cause(evidence, slowest)
    return found("straggler", figures | of_cause, case=case, gain=slowest.gain)


def _cause(evidence: Evidence, slowest: Straggler) -> tuple[str, Figures]:
    """Returns the clock of the rank's card if it stands out, with the case of words for what to do; else the part of
    the step."""
    rank, other, part = slowest.rank, slowest.typical, slowest.part
    usual_ms = ms_of(other, part)
    least = 1 + limits.EXPLAINED_FACTOR * (ms_of(rank, part) / usual_ms - 1) if usual_ms > 0 else 1.0
    clock, usual_clock = _clock_mhz(evidence, rank), _clock_mhz(evidence, other)
    is_of_card = part in (*_PHASES, "clock")
    if is_of_card and clock and usual_clock and usual_clock / clock >= max(least, 1 / limits.CLOCK_FRAC):
        return "clock", {"sm_clock_mhz": clock, "usual_clock_mhz": usual_clock}
    return part, {}


def waits_for_others_ms(evidence: Evidence) -> dict[int, float]:
    """Returns the milliseconds of a step for which each rank waits for the slowest one; empty if unknown."""
    ranks = _compared_ranks(evidence)
    if not ranks or not _has_phases(evidence, ranks):
        return {}
    work_ms = {one["rank"]: sum(ms_of(one, part) for part in (*_BETWEEN, *_PHASES)) for one in ranks}
    most_ms = max(work_ms.values())
    sync_ms = {one["rank"]: ms_of(one, "compute") - sum(ms_of(one, part) for part in _PHASES) for one in ranks}
    return {rank: min(most_ms - own_ms, max(0.0, sync_ms[rank])) for rank, own_ms in work_ms.items()}


def _slowest_of(evidence: Evidence) -> Straggler | None:
    """Returns the rank that the others wait for, if that costs a good share of the step beyond noise."""
    ranks = _compared_ranks(evidence)
    if not ranks:
        return None
    own: tuple[Part, ...] = _PHASES if _has_phases(evidence, ranks) else ("optimizer",)
    # A card that gets hot in the first steps makes the interval of all steps wide.
    whole = _behind(ranks, (*_BETWEEN, *_PHASES)) if own is _PHASES else None
    return whole or _behind(ranks, _BETWEEN) or _by_clock(evidence, ranks, own)


def _compared_ranks(evidence: Evidence) -> list[RankEntry]:
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


def _has_phases(evidence: Evidence, ranks: Sequence[RankEntry]) -> bool:
    """Returns whether the forward pass of each rank is known and is its own work."""
    is_sharded = "fsdp" in str(evidence.value("trainer.strategy"))
    return not is_sharded and all(one.get("forward_frac") is not None for one in ranks)


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
    name = "work_half_ms" if "forward" in parts else "between_half_ms"
    halves = [half for one in (slow, nearest) if isinstance(half := one.get(name), float | int)]
    least_ms = max(limits.HOST_FRAC * step_ms, limits.HOST_MS) if part == "host" else limits.STRAGGLER_FRAC * step_ms
    if len(halves) < 2 or lost_ms < max(least_ms, math.hypot(*halves)):
        return None
    hidden_ms = 0.0
    if part == "forward":
        backward_ms = ms_of(slow, "backward") * max(0.0, excess_ms[part] / ms_of(slow, part))
        hidden_ms = min(backward_ms, limits.BACKWARD_FACTOR * excess_ms[part])
    return Straggler(slow, typical, part, step_ms, lost_ms, math.hypot(*halves), hidden_ms)


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


def _by_clock(evidence: Evidence, ranks: Sequence[RankEntry], own: Sequence[Part]) -> Straggler | None:
    """Returns the rank with a slow card, where its compute time contains waiting for others.

    The clock counts if the phases in which a rank waits for no other one take longer, too.
    """
    clocks = [_clock_mhz(evidence, one) for one in ranks]
    slowness = [1 / clock if clock else 0.0 for clock in clocks]
    top, _ = _slowest(ranks, slowness)
    if top is None:
        return None
    *others, _ = sorted(range(len(ranks)), key=slowness.__getitem__)
    typical = others[(len(others) - 1) // 2]
    factor = slowness[top] / slowness[typical] if slowness[typical] else 1.0
    usual_ms = {part: median(ms_of(one, part) for one in ranks if one is not ranks[top]) for part in own}
    longer = min(ms_of(ranks[top], part) / usual_ms[part] if usual_ms[part] > 0 else 1.0 for part in own)
    if limits.CLOCK_FRAC * factor <= 1 or longer - 1 < limits.EXPLAINED_FACTOR * (factor - 1):
        return None
    step_ms, most_ms = ranks[top]["step_ms_mean"], ms_of(ranks[top], "compute") * (1 - 1 / factor)
    if most_ms < limits.STRAGGLER_FRAC * step_ms:
        return None
    return Straggler(ranks[top], ranks[typical], "clock", step_ms, most_ms / 2, most_ms / 2)


def ms_of(rank: RankEntry, part: str) -> float:
    """Returns the mean milliseconds of a part of a rank's step; 0 if unknown."""
    share = rank.get(f"{part}_frac")
    return rank["step_ms_mean"] * share if isinstance(share, float | int) else 0.0


def _clock_mhz(evidence: Evidence, rank: RankEntry) -> float | None:
    """Returns the mean clock of a rank's card; None if it was not read."""
    clock = evidence.record.gpus.get(rank["gpu"] or "", {}).get("sm_clock_mhz")
    return clock.get("mean") if isinstance(clock, dict) else None
