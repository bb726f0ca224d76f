"""Compares the cards and machines of two ranks, to find why one of them is slower."""

from __future__ import annotations

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence, host_of
from wellfed.explain.diagnosis.finding import Figures
from wellfed.explain.diagnosis.script_words import is_script
from wellfed.record import RankEntry
from wellfed.units import show_gib, show_percent

Trouble = tuple[str, Figures]
"""Text that says what is wrong, and its figures."""
MachineTrouble = tuple[str, Figures, str]
"""The same, and what to do about it."""
_END_OTHERS = "End what else runs on that machine, or leave it out"


def machine_trouble(
    evidence: Evidence, rank: RankEntry, other: RankEntry, *, lost_frac: float, is_loading: bool
) -> MachineTrouble | None:
    """Returns what a rank lacks on its machine that another rank has; None if that is no cause.

    Args:
        lost_frac: share of a step to explain.
        is_loading: whether the rank waits for data.
    """
    cores, taken = rank.get("host_cores", 1), _others_cores(evidence, rank)
    is_taken = taken >= limits.OTHERS_FRAC * cores
    by_others = f"other programs take {taken:.1f} of the {cores} cores of its machine, and "
    waited, usual = rank.get("core_wait_frac") or 0.0, other.get("core_wait_frac") or 0.0
    least = max(limits.CORE_WAIT_FRAC, limits.EXPLAINED_FACTOR * lost_frac)
    if waited - usual >= least and usual < waited / 2:
        text = f"it was ready to run and had no core for {show_percent(waited)} of the time, "
        text += f"rank {other['rank']} for {show_percent(usual)}"
        if is_taken:
            return by_others + text, {"core_wait_frac": waited, "others_cores": taken}, _END_OTHERS
        cure = "Its data workers, another program on its core or the CPU limit of its container leave none: set fewer "
        cure += "loader.num_workers, end that program, or give it more cores"
        return text, {"core_wait_frac": waited}, cure
    if host_of(rank) == host_of(other):
        return None
    is_full = (rank.get("machine_cores") or 0.0) >= limits.CPU_FULL_FRAC * cores
    if is_full and is_taken and _others_cores(evidence, other) < taken / 2:
        return f"{by_others}all of them are busy", {"others_cores": taken, "host_cores": cores}, _END_OTHERS
    waiting, usual = rank.get("iowait_cores") or 0.0, other.get("iowait_cores") or 0.0
    if is_loading and waiting >= limits.IOWAIT_CORES and usual < waiting / 2:
        text = (
            f"{waiting:.1f} cores of its machine wait for its disk, {usual:.1f} on the machine of rank {other['rank']}"
        )
        return text, {"iowait_cores": waiting}, "Look at that disk and what else uses it, or leave the machine out"
    return None


def _others_cores(evidence: Evidence, rank: RankEntry) -> float:
    """Returns the cores of a rank's machine that are busy with none of the run's ranks; 0 if those are unknown."""
    own = [one.get("cores") for one in evidence.record.ranks if host_of(one) == host_of(rank)]
    known = [cores for cores in own if cores is not None]
    if len(known) < len(own) or len(evidence.record.ranks) < evidence.num_ranks:
        return 0.0
    return max(0.0, (rank.get("machine_cores") or 0.0) - sum(known))


def card_trouble(evidence: Evidence, rank: RankEntry, other: RankEntry, *, longer: float) -> Trouble | None:
    """Returns why the clock of a rank's card is slower than that of another.

    None if it is not, or if that explains too little of how many times longer it takes.
    """
    clock, usual_clock = clock_mhz(evidence, rank), clock_mhz(evidence, other)
    if not clock or not usual_clock or clock >= limits.CLOCK_FRAC * usual_clock:
        return None
    if usual_clock / clock - 1 < limits.EXPLAINED_FACTOR * (longer - 1):
        return None
    figures: Figures = {"sm_clock_mhz": clock, "usual_clock_mhz": usual_clock}
    for name, what in (("heat_limited", "heat"), ("power_limited", "its power limit")):
        limited, usual = _figure(evidence, rank, name) or 0.0, _figure(evidence, other, name) or 0.0
        if limited > limits.LIMITED_FRAC and usual < limited / 2:
            held = f"the clocks of its GPU were held down by {what} in {show_percent(limited)} of the readings"
            return f"{held}, at {clock:.0f} MHz on average", {"limited_by": what, "limited_frac": limited, **figures}
    return f"its GPU runs at {clock:.0f} MHz, that of rank {other['rank']} at {usual_clock:.0f} MHz", figures


def clock_mhz(evidence: Evidence, rank: RankEntry) -> float | None:
    """Returns the mean clock of a rank's card; None if it was not read."""
    return _figure(evidence, rank, "sm_clock_mhz")


def _figure(evidence: Evidence, rank: RankEntry, name: str) -> float | None:
    """Returns a figure of a rank's card over the training; None if it was not read."""
    found = evidence.record.gpus.get(rank["gpu"] or "", {}).get(name)
    return found.get("mean") if isinstance(found, dict) else None


def others_memory(evidence: Evidence, rank: RankEntry, other: RankEntry) -> str | None:
    """Returns what other processes held of a rank's card, if that is more than of another rank's.

    None for a script: its ranks hold memory before they are watched.
    """
    if is_script(evidence.record):
        return None
    held, usual_gib = _others_gib(evidence, rank), _others_gib(evidence, other)
    if held - usual_gib < limits.OTHERS_GIB:
        return None
    return f"Other processes held {show_gib(held)} of its GPU when the run began, and may compute on it"


def _others_gib(evidence: Evidence, rank: RankEntry) -> float:
    """Returns the memory of a rank's card that other processes held when the run started."""
    for card in evidence.record.machine.get("gpus", ()):
        node, index = int(card.get("node") or 0), card.get("index")
        if rank["gpu"] is not None and node == rank["node"] and str(index) == rank["gpu"].rpartition("/")[2]:
            return sum(float(holder.get("memory_gib") or 0.0) for holder in card.get("holders") or ())
    return 0.0
