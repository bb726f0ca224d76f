"""Finds a rank whose batches come late, so that all other ranks wait for it."""

from __future__ import annotations

import math

from wellfed.explain.diagnosis.evidence import Evidence, host_of
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.gains.feeding import knobs, most_workers
from wellfed.explain.diagnosis.ranks.rank_comparison import Straggler, straggling
from wellfed.explain.diagnosis.thresholds import BUILD_WAITS_FRAC, CAPACITY_FRAC
from wellfed.record import RankEntry
from wellfed.units import show_ms


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if one rank waits longer for its data than the others, and they wait for it."""
    found = straggling(evidence, "input_straggler")
    if found is None:
        return None
    (waits_ms, usual_ms), figures = found.ms("wait"), _building(found)
    text = (
        f"in each step it waits {show_ms(waits_ms)} for data, and rank {found.typical['rank']} waits "
        f"{show_ms(usual_ms)}"
    )
    if figures:
        text += f". It builds a batch in {show_ms(float(figures['build_ms']))}"
        if (other_ms := found.typical.get("build_ms")) is not None:
            text += f", rank {found.typical['rank']} in {show_ms(other_ms)}"
    change = _more_workers(evidence, found)
    return found.finding("input_straggler", text, {"wait_ms": waits_ms, **figures}, change)


def _building(found: Straggler) -> Figures:
    build_ms, cpu_frac = found.rank.get("build_ms"), found.rank.get("build_cpu_frac")
    figures: Figures = {} if build_ms is None else {"build_ms": build_ms}
    return figures if cpu_frac is None or build_ms is None else {**figures, "build_cpu_frac": cpu_frac}


def _more_workers(evidence: Evidence, found: Straggler) -> tuple[str, ...]:
    """Returns the override that lets this rank build batches as fast as steps use them, if workers can do it."""
    build_ms, cpu_frac = found.rank.get("build_ms"), found.rank.get("build_cpu_frac")
    waits = cpu_frac is not None and cpu_frac < BUILD_WAITS_FRAC
    fed_ms = CAPACITY_FRAC * (found.step_ms - found.lost_ms)
    if build_ms is None or fed_ms <= 0 or evidence.value("loader.backend") == "own":
        return ()
    needed = math.ceil(build_ms / fed_ms) + 1
    if needed > most_workers(evidence):
        return ()
    more = needed - evidence.num_workers
    if more <= 0 or not (waits or _has_cores(evidence, found.rank, more)):
        return ()
    own = {"backend": "auto"} if evidence.value("loader.backend") == "inline" else {}
    return knobs(evidence, **own, num_workers=needed)


def _has_cores(evidence: Evidence, rank: RankEntry, more: int) -> bool:
    """Returns whether all ranks of this one's machine may have so many workers more, by quota and idle cores."""
    here, quota = [one for one in evidence.record.ranks if host_of(one) == host_of(rank)], rank.get("cpu_quota_cores")
    if quota is None:
        return False
    idle = rank.get("host_cores", 0) - (rank.get("machine_cores") or 0.0)
    left = quota - sum(one.get("cores") or 0.0 for one in here)
    return len(here) * more <= min(idle, left)
