"""Finds the rank that all others wait for, and the part of its step that takes longer.

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
from wellfed.record.entries import RankEntry
from wellfed.units import MIB, show_bytes, show_count, show_ms, show_percent

Part = Literal["wait", "copy", "host", "forward", "optimizer", "clock"]
"""Parts of a step; ``clock``: the card is slow, wherever that costs time."""
_NAMES: dict[Part, str] = {
    **{"wait": "waiting for data", "copy": "copy to the GPU", "host": "time between two steps"},
    **{"forward": "forward pass", "optimizer": "optimizer"},
}
_ADVICE: dict[Part, str] = {
    "wait": "Look at what builds its batches: its disk, its cores, its share of the data. Or set more "
    "loader.num_workers.",
    "copy": "Look at the link of its card (nvidia-smi topo -m). loader.pin_memory and loader.device_prefetch hide "
    "copies.",
    "host": "Make the callbacks, loggers and hooks cheaper that run on this rank alone.",
    "forward": "Give all ranks samples of alike number and length, and look for work that the model does on it alone.",
    "optimizer": "Look at its card, and at what else runs there.",
    "clock": "Look at that card: heat, power, age.",
}
"""Part of the step -> what to do, if no figure of the rank names a cause."""
_BETWEEN: tuple[Part, ...] = ("wait", "copy", "host")
_PHASES: tuple[Part, ...] = ("forward", "optimizer")
_ALIKE_FRAC = 0.5
"""Share of the straggler's excess from which another rank counts as slow, too."""
_MOST_NAMED = 4


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
    found = straggler_of(evidence)
    if found is None:
        return None
    rank, other, part = found.rank, found.typical, found.part
    gpu, host = rank["gpu"], rank.get("host") or f"node {rank['node']}"
    where = f"on {host}" if gpu is None else f"GPU {gpu.rpartition('/')[2]} of {host}"
    waiting = f"Rank {other['rank']} waits" if len(evidence.record.ranks) == 2 else "All other ranks wait"
    text = f"{waiting} for rank {rank['rank']} ({where})"
    if part != "clock":
        slow_ms, usual_ms = show_ms(ms_of(rank, part)), show_ms(ms_of(other, part))
        text += f": its {_NAMES[part]} takes {slow_ms} of a step, that of rank {other['rank']} {usual_ms}"
    text += "."
    figures: Figures = {"rank": rank["rank"], "typical_rank": other["rank"], "part": part, "host": host}
    figures |= {"gpu": gpu or "", "step_ms": found.step_ms, "lost_ms": found.lost_ms}
    advice, cause = _ADVICE[part], _cause(evidence, found)
    if cause is not None:
        why, more, advice = cause
        text += f" {why}."
        figures |= more
    if found.alike:
        more_ranks = f" and {len(found.alike) - _MOST_NAMED} more" if len(found.alike) > _MOST_NAMED else ""
        numbers = ", ".join(map(str, found.alike[:_MOST_NAMED]))
        text += f" Nearly as slow: rank{'s' if len(found.alike) > 1 else ''} {numbers}{more_ranks}."
    return Finding("straggler", text, figures, gain=found.gain, advice=advice)


def _cause(evidence: Evidence, found: Straggler) -> tuple[str, Figures, str] | None:
    """Returns the figure of the rank's batches, card or host that stands out, and what to do; None without one."""
    rank, other = found.rank, found.typical
    usual_ms = ms_of(other, found.part)
    least = 1 + limits.EXPLAINED_FACTOR * (ms_of(rank, found.part) / usual_ms - 1) if usual_ms > 0 else 1.0
    clock, usual_clock = _clock_mhz(evidence, rank), _clock_mhz(evidence, other)
    samples, usual = rank.get("samples") or 0.0, other.get("samples") or 0.0
    mib, usual_mib = rank.get("batch_mib") or 0.0, other.get("batch_mib") or 0.0
    enough = max(least, limits.UNEVEN_FACTOR_OF_RANKS)
    named = f"rank {other['rank']}"
    if found.part == "forward" and usual and samples >= enough * usual:
        why = f"Its batches have {show_count(samples)} samples, those of {named} {show_count(usual)}"
        return why, {"samples": samples, "usual_samples": usual}, "Give all ranks as many samples."
    if found.part == "forward" and usual_mib and mib - (rank.get("batch_half_mib") or 0.0) >= enough * usual_mib:
        why = f"Its batches have {show_bytes(mib * MIB)}, those of {named} {show_bytes(usual_mib * MIB)}"
        return why, {"batch_mib": mib, "usual_batch_mib": usual_mib}, "Group samples by length."
    is_of_card = found.part in (*_PHASES, "clock")
    if is_of_card and clock and usual_clock and usual_clock / clock >= max(least, 1 / limits.CLOCK_FRAC):
        why = f"Its GPU runs at {clock:.0f} MHz, that of {named} at {usual_clock:.0f} MHz"
        return why, {"sm_clock_mhz": clock, "usual_clock_mhz": usual_clock}, _ADVICE["clock"]
    waited, usual_waited = rank.get("core_wait_frac") or 0.0, other.get("core_wait_frac") or 0.0
    if waited - usual_waited >= limits.CORE_WAIT_FRAC and usual_waited < waited / 2:
        why = f"It had no core for {show_percent(waited)} of the time, {named} for {show_percent(usual_waited)}"
        return why, {"core_wait_frac": waited}, "End what else runs there, or set fewer loader.num_workers."
    waiting, usual_waiting = rank.get("iowait_cores") or 0.0, other.get("iowait_cores") or 0.0
    if found.part == "wait" and waiting >= limits.IOWAIT_CORES and usual_waiting < waiting / 2:
        why = f"{waiting:.1f} cores of its machine wait for its disk, {usual_waiting:.1f} on that of {named}"
        return why, {"iowait_cores": waiting}, "Look at that disk and what else uses it."
    return None


def waits_for_others_ms(evidence: Evidence) -> dict[int, float]:
    """Returns the milliseconds of a step for which each rank waits for the slowest one; empty if unknown."""
    ranks = _compared_ranks(evidence)
    if not ranks or not _has_phases(evidence, ranks):
        return {}
    work_ms = {one["rank"]: sum(ms_of(one, part) for part in (*_BETWEEN, *_PHASES)) for one in ranks}
    most_ms = max(work_ms.values())
    sync_ms = {one["rank"]: ms_of(one, "compute") - sum(ms_of(one, part) for part in _PHASES) for one in ranks}
    return {rank: min(most_ms - own_ms, max(0.0, sync_ms[rank])) for rank, own_ms in work_ms.items()}


def straggler_of(evidence: Evidence) -> Straggler | None:
    """Returns the rank that the others wait for, if that costs a good share of the step beyond noise."""
    ranks = _compared_ranks(evidence)
    if not ranks:
        return None
    if not _has_phases(evidence, ranks):
        return _behind(ranks, _BETWEEN) or _by_clock(evidence, ranks, ("optimizer",))
    # A card that gets hot in the first steps makes the interval of all steps wide.
    found = _behind(ranks, (*_BETWEEN, *_PHASES)) or _behind(ranks, _BETWEEN)
    return found or _by_clock(evidence, ranks, _PHASES)


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
    alike = tuple(one["rank"] for one, is_alike in zip(ranks, is_slow, strict=True) if is_alike and one is not slow)
    return Straggler(slow, typical, alike, part, step_ms, lost_ms, math.hypot(*halves), hidden_ms)


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
    return Straggler(ranks[top], ranks[typical], (), "clock", step_ms, most_ms / 2, most_ms / 2)


def ms_of(rank: RankEntry, part: str) -> float:
    """Returns the mean milliseconds of a part of a rank's step; 0 if unknown."""
    share = rank.get(f"{part}_frac")
    return rank["step_ms_mean"] * share if isinstance(share, float | int) else 0.0


def _clock_mhz(evidence: Evidence, rank: RankEntry) -> float | None:
    """Returns the mean clock of a rank's card; None if it was not read."""
    found = evidence.record.gpus.get(rank["gpu"] or "", {}).get("sm_clock_mhz")
    return found.get("mean") if isinstance(found, dict) else None
