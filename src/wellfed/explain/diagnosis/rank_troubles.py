"""Compares the cards and machines of two ranks, to find why one of them is slower."""

from __future__ import annotations

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures
from wellfed.record import RankEntry
from wellfed.units import show_gib, show_percent

Trouble = tuple[str, Figures]
"""Text that says what is wrong, and its figures."""


def machine_trouble(
    evidence: Evidence, rank: RankEntry, other: RankEntry, *, lost_frac: float, is_loading: bool
) -> Trouble | None:
    """Returns what a rank lacks on its machine that another rank has; None if that is no cause.

    Args:
        lost_frac: share of a step to explain.
        is_loading: whether the rank waits for data.
    """
    waited, usual = rank.get("core_wait_frac") or 0.0, other.get("core_wait_frac") or 0.0
    least = max(limits.CORE_WAIT_FRAC, limits.EXPLAINED_FACTOR * lost_frac)
    if waited - usual >= least and usual < waited / 2:
        text = f"it was ready to run and had no core for {show_percent(waited)} of the time, "
        return f"{text}rank {other['rank']} for {show_percent(usual)}", {"core_wait_frac": waited}
    if rank["node"] == other["node"]:
        return None
    taken, usual, cores = _others_cores(evidence, rank), _others_cores(evidence, other), rank.get("host_cores", 1)
    is_full = (rank.get("machine_cores") or 0.0) >= limits.CPU_FULL_FRAC * cores
    if is_full and taken >= limits.OTHERS_FRAC * cores and usual < taken / 2:
        text = f"other programs take {taken:.1f} of the {cores} cores of its machine, and all of them are busy"
        return text, {"others_cores": taken, "host_cores": cores}
    waiting, usual = rank.get("iowait_cores") or 0.0, other.get("iowait_cores") or 0.0
    if is_loading and waiting >= limits.IOWAIT_CORES and usual < waiting / 2:
        text = (
            f"{waiting:.1f} cores of its machine wait for its disk, {usual:.1f} on the machine of rank {other['rank']}"
        )
        return text, {"iowait_cores": waiting}
    return None


def _others_cores(evidence: Evidence, rank: RankEntry) -> float:
    """Returns the cores of a rank's machine that are busy with none of the run's ranks."""
    own = sum(one.get("cores") or 0.0 for one in evidence.record.ranks if one["node"] == rank["node"])
    return max(0.0, (rank.get("machine_cores") or 0.0) - own)


def card_trouble(evidence: Evidence, rank: RankEntry, other: RankEntry) -> Trouble | None:
    """Returns what slows the card of a rank and not that of another; None if nothing is seen."""
    for name, what in (("heat_limited", "heat"), ("power_limited", "its power limit")):
        limited, usual = _figure(evidence, rank, name) or 0.0, _figure(evidence, other, name) or 0.0
        if limited > limits.LIMITED_FRAC and usual < limited / 2:
            clock = _figure(evidence, rank, "sm_clock_mhz")
            text = f"the clocks of its GPU were held down by {what} in {show_percent(limited)} of the readings"
            figures: Figures = {"limited_by": what, "limited_frac": limited}
            if clock is not None:
                text, figures = f"{text}, at {clock:.0f} MHz on average", {**figures, "sm_clock_mhz": clock}
            return text, figures
    clock, usual_clock = _figure(evidence, rank, "sm_clock_mhz"), _figure(evidence, other, "sm_clock_mhz")
    if clock and usual_clock and clock < limits.CLOCK_FRAC * usual_clock:
        text = f"its GPU runs at {clock:.0f} MHz, that of rank {other['rank']} at {usual_clock:.0f} MHz"
        return text, {"sm_clock_mhz": clock, "usual_clock_mhz": usual_clock}
    held, usual_gib = _others_gib(evidence, rank), _others_gib(evidence, other)
    if held - usual_gib >= limits.OTHERS_GIB:
        text = f"other processes hold {show_gib(held)} of its GPU, and may compute on it"
        return text, {"others_gib": held}
    return None


def clock_factor(evidence: Evidence, rank: RankEntry, other: RankEntry) -> float:
    """Returns how much slower the clock of a rank's card is than that of another's; 1 if it is not."""
    clock, usual = _figure(evidence, rank, "sm_clock_mhz"), _figure(evidence, other, "sm_clock_mhz")
    return usual / clock if clock and usual and clock < limits.CLOCK_FRAC * usual else 1.0


def _figure(evidence: Evidence, rank: RankEntry, name: str) -> float | None:
    """Returns a figure of a rank's card over the training; None if it was not read."""
    found = evidence.record.gpus.get(rank["gpu"] or "", {}).get(name)
    return found.get("mean") if isinstance(found, dict) else None


def _others_gib(evidence: Evidence, rank: RankEntry) -> float:
    """Returns the memory of a rank's card that other processes held when the run started."""
    for card in evidence.record.machine.get("gpus", ()):
        node, index = int(card.get("node") or 0), card.get("index")
        if rank["gpu"] is not None and node == rank["node"] and str(index) == rank["gpu"].rpartition("/")[2]:
            return sum(float(holder.get("memory_gib") or 0.0) for holder in card.get("holders") or ())
    return 0.0
