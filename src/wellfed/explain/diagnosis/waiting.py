"""Decides why the steps of a run wait for data: one cause, which one rule reports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures
from wellfed.explain.diagnosis.gains.feeding import (
    Feeding,
    feeding_of,
    has_unused_fetch,
    is_starved,
    ready_mib,
    room_mib,
    steady_steps,
)
from wellfed.units import counted, show_duration, show_percent

Cause = Literal[
    "loading_in_main_process",
    "too_few_workers",
    "cpu_bound_loading",
    "slow_storage",
    "contended_loading",
    "uneven_batches",
    "slow_samples",
    "slow_handover",
    "slow_copy",
]
"""Ids of the rules that report them."""


@dataclass(frozen=True)
class CauseOfWaiting:
    """Cause of the waiting, with its figures."""

    cause: Cause
    frac: float
    """Share of a step that waits."""
    feeding: Feeding

    @property
    def share_text(self) -> str:
        """Beginning of the message: the share of a step that waits."""
        return f"{show_percent(self.frac)} of each step waits for data"


def cause_of_waiting(evidence: Evidence) -> CauseOfWaiting | None:
    """Returns the cause; None if steps hardly wait, or if the cause is unknown."""
    feeding = feeding_of(evidence)
    if feeding is None or not is_starved(evidence):
        return None
    cause = _cause(evidence, feeding)
    return None if cause is None else CauseOfWaiting(cause, 1 - feeding.fed_ms / feeding.step_ms, feeding)


def latency_of(evidence: Evidence, waiting: CauseOfWaiting) -> tuple[str, Figures, float]:
    """Returns the waiting in single slow steps: beginning of the message, figures, and share of the time lost."""
    slow = slow_steps(evidence, waiting.feeding)
    waited_ms = evidence.steps.wait_ms[slow]
    share, longest_ms = float(waited_ms.sum() / evidence.steps.wait_ms.sum()), float(waited_ms.max())
    text = (
        f"{show_percent(waiting.frac)} of training waits for data, {show_percent(share)} of that in "
        f"{counted(len(slow), 'step')} of {len(evidence.steps.wait_ms)}, up to {show_duration(longest_ms / 1e3)} each"
    )
    figures: Figures = {"slow_steps": len(slow), "slowest_wait_ms": longest_ms, "share_of_waiting_frac": share}
    return text, figures, waiting.frac * share


def _cause(evidence: Evidence, feeding: Feeding) -> Cause | None:
    if copy_ahead_ms(evidence) >= limits.COPY_AHEAD_FRAC * feeding.step_ms:
        return "slow_copy"
    advised = feeding.workers_advised
    of_use = feeding.gain(advised).factor >= limits.LEAST_GAIN
    if has_slow_builds(evidence, feeding):
        return "slow_samples" if slow_twice(evidence) else "uneven_batches"
    if not feeding.num_workers:
        return "loading_in_main_process" if of_use or has_unused_fetch(evidence) else "cpu_bound_loading"
    if feeding.waits_outside and reads_slowly(evidence):
        return "slow_storage"
    if feeding.contention is not None:
        return "contended_loading"
    if has_unused_fetch(evidence) and not feeding.waits_outside:
        return "cpu_bound_loading"
    if prefetch_needed(evidence, feeding) is not None:
        return "uneven_batches"
    if not feeding.waits_for_core:
        if handover_ms(evidence) >= limits.EVEN_FRAC * (feeding.step_ms - feeding.fed_ms) and feeding.has_enough:
            return "slow_handover"
        return "too_few_workers" if advised > feeding.num_workers and of_use else None
    # Other processes delay the batches if all cores would build one in a small part of a step.
    is_little = feeding.build_cpu_ms / feeding.cores < limits.LITTLE_FRAC * feeding.fed_ms
    return None if feeding.has_other_load and is_little else "cpu_bound_loading"


def copy_ahead_ms(evidence: Evidence) -> float:
    """Returns the median milliseconds to copy a batch to the GPU ahead of its step; 0 if none was."""
    found = evidence.steps.column("copy_ahead_ms")
    found = found[np.isfinite(found)]
    return float(np.median(found)) if len(found) else 0.0


def handover_ms(evidence: Evidence) -> float:
    """Returns the milliseconds most steps wait for a ready batch; 0 if no other process builds it."""
    if evidence.value("loader.backend") not in ("processes", "torch", "own") or not evidence.num_workers:
        return 0.0
    return float(np.median(evidence.steps.wait_ms)) if len(evidence.steps.wait_ms) else 0.0


def slow_steps(evidence: Evidence, feeding: Feeding) -> npt.NDArray[np.intp]:
    """Returns the indices of steps that waited far longer than others, without the first steps of epochs."""
    return np.flatnonzero((evidence.steps.wait_ms > limits.SLOW_STEP_FACTOR * feeding.fed_ms) & steady_steps(evidence))


def has_slow_builds(evidence: Evidence, feeding: Feeding) -> bool:
    """Returns whether most of the waiting is in few steps, each far longer than others."""
    wait_ms, slow = evidence.steps.wait_ms, slow_steps(evidence, feeding)
    builds = evidence.steps.column("build_ms")
    if not limits.FEWEST_SLOW <= len(slow) <= limits.SLOW_STEPS_FRAC * len(wait_ms) or len(builds) != len(wait_ms):
        return False
    if not np.isfinite(builds[slow]).any():
        return False
    is_built_slowly = float(np.nanmedian(builds[slow])) > limits.SLOW_BUILD_FACTOR * float(np.nanmedian(builds))
    return is_built_slowly and float(wait_ms[slow].sum()) >= 0.5 * float(wait_ms.sum())


def slow_twice(evidence: Evidence) -> dict[int, list[float]]:
    """Returns the samples that took very long in at least two epochs, with their milliseconds in each. Empty if few
    were slow twice, or if whole batches are fetched."""
    epoch, build_ms, slowest_ms, index = map(
        evidence.steps.column, ("epoch", "build_ms", "slowest_ms", "slowest_index")
    )
    if not len(index) or len({len(epoch), len(build_ms), len(slowest_ms), len(index)}) > 1:
        return {}
    # One sample took most of the time of a batch that took far longer than others.
    is_slow = (build_ms > limits.SLOW_BUILD_FACTOR * np.nanmedian(build_ms)) & (slowest_ms > 0.5 * build_ms)
    found: dict[int, dict[int, float]] = {}
    for of_epoch, sample, ms in zip(epoch[is_slow], index[is_slow], slowest_ms[is_slow], strict=True):
        found.setdefault(int(sample), {})[int(of_epoch)] = float(ms)
    repeated = {sample: list(times.values()) for sample, times in found.items() if len(times) > 1}
    fewest = min((int(np.sum(is_slow & (epoch == one))) for one in np.unique(epoch[is_slow])), default=0)
    return repeated if len(repeated) >= limits.REPEATED_FRAC * fewest else {}


def prefetch_needed(evidence: Evidence, feeding: Feeding) -> int | None:
    """Returns the batches that each worker must keep ready to bridge the slowest; None if unevenness is not the cause,
    or nothing helps.

    A worker builds batches in the order of requests. So n requests ahead give it n x workers steps, minus the time of
    n - 1 other batches.
    """
    if feeding.waits_for_core:  # then batches are late that wait for a core
        return None
    workers, mean_ms = feeding.num_workers, feeding.build_ms
    builds = evidence.steps.column("build_ms")
    builds = builds[np.isfinite(builds)]
    spare_ms = workers * feeding.fed_ms - mean_ms
    if len(builds) < limits.FEWEST_STEPS or mean_ms > limits.CAPACITY_FRAC * workers * feeding.fed_ms:
        return None
    slowest_ms = float(np.quantile(builds, 0.99))
    # With many other processes any batch may be late.
    if slowest_ms < limits.UNEVEN_FACTOR * mean_ms * (2 if feeding.has_other_load else 1):
        return None
    needed = max(2 * feeding.prefetch, math.ceil((slowest_ms - mean_ms) / spare_ms) + 1)
    most = _most_prefetch(evidence, workers)
    return min(needed, most) if most > feeding.prefetch else None


def way_out_of_latency(evidence: Evidence, feeding: Feeding) -> tuple[int, int] | None:
    """Returns the number of workers, and ready batches of each, that bridge random delays; None if nothing does.

    More workers if the present ones can't keep up on average. Then the smallest queue that does nearly as well as the
    largest that memory allows.
    """
    workers = feeding.num_workers
    if not (workers and feeding.has_enough) and feeding.contention is None:
        workers = max(workers, feeding.workers_advised)
    most = _most_prefetch(evidence, workers)
    sizes = [feeding.prefetch, *(size for size in (4, 8, 16, 32) if feeding.prefetch < size <= most)]
    gains = {size: feeding.gain(workers, size).factor for size in sizes}
    best = max(gains.values())
    if best < limits.LEAST_GAIN:
        return None
    return workers, next(size for size in sizes if gains[size] >= best / limits.LEAST_GAIN)


def _most_prefetch(evidence: Evidence, workers: int) -> int:
    """Returns the ready batches of each worker for which there is memory."""
    of_each = ready_mib(evidence, workers, 1)
    return limits.MOST_PREFETCH if not of_each else int(min(limits.MOST_PREFETCH, room_mib(evidence) / of_each))


def reads_slowly(evidence: Evidence) -> bool:
    """Returns whether cores waited for a disk, or batches of the first epoch took far longer to build."""
    if (evidence.telemetry.mean("iowait_pct") or 0.0) / 100 * (evidence.cores or 1.0) >= limits.IOWAIT_CORES:
        return True
    return (cold_over_warm(evidence) or 1.0) >= limits.COLD_FACTOR


def cold_over_warm(evidence: Evidence) -> float | None:
    """Returns the time to build a batch in the first epoch over that in later ones; None with too few batches."""
    epochs, builds = evidence.steps.column("epoch"), evidence.steps.column("build_ms")
    if not len(epochs) or len(builds) != len(epochs):
        return None
    cold, warm = (part[np.isfinite(part)] for part in (builds[epochs == 0], builds[epochs > 0]))
    if min(len(cold), len(warm)) < limits.FEWEST_STEPS // 2:
        return None
    return float(np.median(cold) / max(np.median(warm), 1e-9))
