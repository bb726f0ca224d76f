"""Decides why steps wait for data, which is one cause, and finds other time that feeding costs: copies, starts.

Causes: no workers, too few of them, the CPU, storage, a shared lock, uneven or slow samples, handover, copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence, once
from wellfed.explain.diagnosis.finding import Finding, Gain, found
from wellfed.explain.diagnosis.gains.feeding import (
    Feeding,
    feeding_of,
    has_unused_fetch,
    is_starved,
    knobs,
    loader_change,
    ready_mib,
    room_mib,
    steady_steps,
    workers_take_cores,
)
from wellfed.explain.diagnosis.script_words import OWN_STREAM, is_script
from wellfed.explain.diagnosis.words import Figures
from wellfed.units import MIB, show_duration


@once
def cause_of_waiting(evidence: Evidence) -> str | None:
    """Returns the id of the rule that reports the cause; None if steps hardly wait, or if the cause is unknown."""
    feeding = feeding_of(evidence)
    return _cause(evidence, feeding) if feeding is not None and is_starved(evidence) else None


def _latency_of(evidence: Evidence, feeding: Feeding) -> tuple[Figures, float]:
    """Returns figures of the waiting in single slow steps, and the share of training's time that it costs."""
    slow = _slow_steps(evidence, feeding)
    waited_ms = evidence.steps.wait_ms[slow]
    share = float(waited_ms.sum() / evidence.steps.wait_ms.sum())
    figures = {**feeding.figures(), "slow_steps": len(slow), "slowest_wait_ms": float(waited_ms.max())}
    figures |= {"share_of_waiting_frac": share, "_steps": len(evidence.steps.wait_ms)}
    return figures, feeding.wait_frac * share


def _cause(evidence: Evidence, feeding: Feeding) -> str | None:
    if (evidence.steps.median("copy_ahead_ms") or 0.0) >= limits.COPY_AHEAD_FRAC * feeding.step_ms:
        return "slow_copy"
    advised = feeding.workers_advised
    of_use = feeding.gain(advised).factor >= limits.LEAST_GAIN
    if _has_slow_builds(evidence, feeding):
        return "slow_samples" if _slow_twice(evidence) else "uneven_batches"
    if has_unused_fetch(evidence) and not feeding.waits_outside:
        return "cpu_bound_loading"
    if not feeding.num_workers:
        return "loading_in_main_process" if of_use else "cpu_bound_loading"
    iowait_cores = (evidence.telemetry.mean("iowait_pct") or 0.0) / 100 * feeding.cores
    is_cold_slow = (_cold_over_warm(evidence) or 1.0) >= limits.COLD_FACTOR
    if feeding.waits_outside and (is_cold_slow or iowait_cores >= limits.IOWAIT_CORES):
        return "slow_storage"
    if feeding.contention is not None:
        return "contended_loading"
    if _prefetch_needed(evidence, feeding) is not None:
        return "uneven_batches"
    if not feeding.waits_for_core:
        if _handover_ms(evidence) >= limits.EVEN_FRAC * (feeding.step_ms - feeding.fed_ms) and feeding.has_enough:
            return "slow_handover"
        return "too_few_workers" if advised > feeding.num_workers and of_use else None
    # Other processes delay the batches if all cores would build one in a small part of a step.
    is_little = feeding.build_cpu_ms / feeding.cores < limits.LITTLE_FRAC * feeding.fed_ms
    return None if feeding.has_other_load and is_little else "cpu_bound_loading"


def _handover_ms(evidence: Evidence) -> float:
    """Returns the milliseconds most steps wait for a ready batch; 0 if no other process builds it."""
    if evidence.value("loader.backend") not in ("processes", "torch", "own") or not evidence.num_workers:
        return 0.0
    return float(np.median(evidence.steps.wait_ms)) if len(evidence.steps.wait_ms) else 0.0


def _slow_steps(evidence: Evidence, feeding: Feeding) -> npt.NDArray[np.intp]:
    """Returns the indices of steps that waited far longer than others, without the first steps of epochs."""
    return np.flatnonzero((evidence.steps.wait_ms > limits.SLOW_STEP_FACTOR * feeding.fed_ms) & steady_steps(evidence))


def _has_slow_builds(evidence: Evidence, feeding: Feeding) -> bool:
    """Returns whether most of the waiting is in few steps, each far longer than others."""
    wait_ms, slow = evidence.steps.wait_ms, _slow_steps(evidence, feeding)
    builds = evidence.steps.column("build_ms")
    if not limits.FEWEST_SLOW <= len(slow) <= limits.SLOW_STEPS_FRAC * len(wait_ms) or len(builds) != len(wait_ms):
        return False
    if not np.isfinite(builds[slow]).any():
        return False
    is_built_slowly = float(np.nanmedian(builds[slow])) > limits.SLOW_BUILD_FACTOR * float(np.nanmedian(builds))
    return is_built_slowly and float(wait_ms[slow].sum()) >= 0.5 * float(wait_ms.sum())


def _slow_twice(evidence: Evidence) -> list[int]:
    """Returns the samples that took very long in at least two epochs. Empty if few were slow twice, or if whole batches
    are fetched."""
    names = ("epoch", "build_ms", "slowest_ms", "slowest_index")
    epoch, build_ms, slowest_ms, index = map(evidence.steps.column, names)
    if not len(index) or len({len(epoch), len(build_ms), len(slowest_ms), len(index)}) > 1:
        return []
    # One sample took most of the time of a batch that took far longer than others.
    is_slow = (build_ms > limits.SLOW_BUILD_FACTOR * np.nanmedian(build_ms)) & (slowest_ms > 0.5 * build_ms)
    samples, epochs = np.unique(np.stack([index[is_slow], epoch[is_slow]]), axis=1)
    repeated, times = np.unique(samples, return_counts=True)
    repeated = repeated[times > 1]
    fewest = min(np.unique(epochs, return_counts=True)[1], default=0)
    return [int(sample) for sample in repeated] if len(repeated) >= limits.REPEATED_FRAC * fewest else []


def _prefetch_needed(evidence: Evidence, feeding: Feeding) -> int | None:
    """Returns the batches that each worker must keep ready to bridge the slowest; None if unevenness is not the cause,
    or there is no memory for more."""
    builds = evidence.steps.known("build_ms")
    if feeding.waits_for_core or not feeding.has_enough or len(builds) < limits.FEWEST_STEPS:
        return None
    slowest_ms = float(np.quantile(builds, 0.99))
    # With many other processes any batch may be late.
    if slowest_ms < limits.UNEVEN_FACTOR * feeding.build_ms * (2 if feeding.has_other_load else 1):
        return None
    # A worker builds batches in the order of requests. So n requests ahead give it n x workers steps, minus the time of
    # n - 1 other batches.
    spare_ms = feeding.num_workers * feeding.fed_ms - feeding.build_ms
    needed = max(2 * feeding.prefetch, math.ceil((slowest_ms - feeding.build_ms) / spare_ms) + 1)
    most = _most_prefetch(evidence, feeding.num_workers)
    return min(needed, most) if most > feeding.prefetch else None


def _most_prefetch(evidence: Evidence, workers: int) -> int:
    """Returns the ready batches of each worker for which there is memory."""
    of_each = ready_mib(evidence, workers, 1)
    return limits.MOST_PREFETCH if not of_each else int(min(limits.MOST_PREFETCH, room_mib(evidence) / of_each))


def _cold_over_warm(evidence: Evidence) -> float | None:
    """Returns the time to build a batch in the first epoch over that in later ones; None with too few batches."""
    epochs, builds = evidence.steps.column("epoch"), evidence.steps.column("build_ms")
    if not len(epochs) or len(builds) != len(epochs):
        return None
    cold, warm = (part[np.isfinite(part)] for part in (builds[epochs == 0], builds[epochs > 0]))
    if min(len(cold), len(warm)) < limits.FEWEST_STEPS // 2:
        return None
    return float(np.median(cold) / max(np.median(warm), 1e-9))


def loading_in_main_process(evidence: Evidence, feeding: Feeding) -> Finding:
    """Returns a finding if there are no workers, and workers could build beside the step."""
    advised = feeding.workers_advised
    is_stopped = evidence.record.config.get("loader", {}).get("persistent_workers") is False
    stays = {"persistent_workers": True} if is_stopped else {}
    way_out = loader_change(evidence, backend="auto", num_workers=advised, **stays)
    return found("loading_in_main_process", feeding.figures(), gain=feeding.gain(advised), **way_out)


def too_few_workers(evidence: Evidence, feeding: Feeding) -> Finding:
    """Returns a finding if more workers would build batches faster."""
    advised = feeding.workers_advised
    figures = {**feeding.figures(), "_is_full": bool(feeding.work.period_ms(advised) > 1.1 * feeding.fed_ms)}
    way_out = loader_change(evidence, num_workers=advised)
    return found("too_few_workers", figures, gain=feeding.gain(advised), **way_out)


_FETCH_FRAC = 0.1
"""Assumed time to fetch a whole batch over that to build it by single samples, for the lower end of a gain."""


def cpu_bound_loading(evidence: Evidence, feeding: Feeding) -> Finding:
    """Returns a finding if more workers would only share the same cores."""
    if has_unused_fetch(evidence):
        is_typed = any(typed.lstrip("+").startswith("loader.") for typed in evidence.record.overrides)
        change = knobs(evidence, backend="auto", num_workers=None) if is_typed else ("loader=auto",)
        low = feeding.step_ms / (feeding.fed_ms + _FETCH_FRAC * feeding.build_ms)
        low = 1.0 if feeding.num_workers or feeding.waits_outside else min(low, feeding.bound)
        gain = Gain(feeding.bound, low, feeding.bound)
        return found("cpu_bound_loading", feeding.figures(), change, case="by_sample", gain=gain)
    figures = {**feeding.figures(), "_shared": feeding.others >= 0.1 * feeding.cores}
    figures |= {"_is_one": feeding.cores == 1, "_are_more": feeding.cores != 1}
    return found("cpu_bound_loading", figures, lost_frac=feeding.wait_frac)


def slow_storage(evidence: Evidence, feeding: Feeding) -> Finding:
    """Returns a finding if building hardly uses the CPU, and there is evidence that it waits for the disk."""
    figures = {**feeding.figures(), "iowait_pct": evidence.telemetry.mean("iowait_pct")}
    figures["cold_over_warm"] = _cold_over_warm(evidence)
    needed = feeding.workers_advised
    gain = feeding.gain(needed)
    if needed <= feeding.num_workers or gain.factor < limits.LEAST_GAIN:
        return found("slow_storage", figures, lost_frac=feeding.wait_frac)
    gain, change = Gain(gain.factor, 1.0, gain.high), knobs(evidence, num_workers=needed)
    return found("slow_storage", {**figures, "_helps": True}, change, gain=gain)


def contended_loading(evidence: Evidence, feeding: Feeding) -> Finding:
    """Returns a finding if a batch takes far longer beside other workers than with one worker alone.

    That was timed before training, or workers were seen to wait for a lock that they share.
    """
    figures = {**feeding.figures(), "contention_factor": feeding.contention, "lock_frac": feeding.lock_frac}
    is_locked = feeding.lock_frac >= 1 - 1 / limits.CONTENTION_FACTOR
    figures |= {"_is_locked": is_locked, "_was_timed": not is_locked}
    return found("contended_loading", figures, lost_frac=feeding.wait_frac)


def workers_take_the_cpu(evidence: Evidence) -> Finding | None:
    """Returns a finding if all cores are full, and steps are slowed down."""
    feeding, factor = feeding_of(evidence), evidence.ceiling_factor
    if feeding is None or factor is None or not workers_take_cores(evidence):
        return None
    fewer, top = max(1, int(feeding.cores) - 1), max(1.0, factor)
    figures: Figures = {**feeding.figures(), "step_ms": feeding.step_ms, "ceiling_step_ms": feeding.step_ms / factor}
    figures["loader_frac"] = (evidence.telemetry.mean("loader_cpu_pct") or 0.0) / 100 / feeding.cores
    if feeding.num_workers <= fewer:
        return found("workers_take_the_cpu", figures, lost_frac=1 - 1 / top)
    way_out = loader_change(evidence, num_workers=fewer)
    return found("workers_take_the_cpu", figures, gain=Gain(top, 1.0, top), lost_frac=1 - 1 / top, **way_out)


_QUEUES = (4, 8, 16, 32)
"""Batches kept ready by each worker that are tried against random latency."""


def uneven_batches(evidence: Evidence, feeding: Feeding) -> Finding:
    """Returns a finding if more batches kept ready would bridge the slow ones, or latency is random."""
    if not _has_slow_builds(evidence, feeding):
        needed = _prefetch_needed(evidence, feeding)
        p99_ms = float(np.quantile(evidence.steps.known("build_ms"), 0.99))
        figures = {**feeding.figures(), "slowest_build_ms": p99_ms, "_needed": needed, "_prefetch": feeding.prefetch}
        gain, way_out = feeding.gain(feeding.num_workers, needed), loader_change(evidence, prefetch_factor=needed)
        return found("uneven_batches", figures, gain=gain, **way_out)
    figures, lost_frac = _latency_of(evidence, feeding)
    workers = feeding.num_workers
    if not feeding.has_enough and feeding.contention is None:
        workers = max(workers, feeding.workers_advised)
    # The smallest queue that does nearly as well as the largest that memory allows.
    most = _most_prefetch(evidence, workers)
    sizes = [feeding.prefetch, *(size for size in _QUEUES if feeding.prefetch < size <= most)]
    gains = {size: feeding.gain(workers, size) for size in sizes}
    best = max(gain.factor for gain in gains.values())
    prefetch = next(size for size in sizes if gains[size].factor >= best / limits.LEAST_GAIN)
    if best < limits.LEAST_GAIN or (workers, prefetch) == (feeding.num_workers, feeding.prefetch):
        return found("uneven_batches", figures, case="latency", lost_frac=lost_frac)
    ahead = {} if feeding.num_workers else {"backend": "auto"}
    way_out = loader_change(evidence, **ahead, num_workers=workers, prefetch_factor=prefetch)
    figures["_bridged"] = True
    return found("uneven_batches", figures, case="latency", gain=gains[prefetch], **way_out)


_NAMED = 5


def slow_samples(evidence: Evidence) -> Finding | None:
    """Returns a finding if the same samples were slow in two epochs, or a note on samples that were left out."""
    feeding = feeding_of(evidence)
    if feeding is not None and cause_of_waiting(evidence) == "slow_samples":
        repeated, (figures, lost_frac) = _slow_twice(evidence), _latency_of(evidence, feeding)
        figures |= {"samples_slow_twice": len(repeated), "_named": ", ".join(map(str, repeated[:_NAMED]))}
        figures["_more"] = len(repeated) - _NAMED if len(repeated) > _NAMED else None
        return found("slow_samples", figures, lost_frac=lost_frac)
    lost = [event for event in evidence.record.events if event["kind"] == "sample_skipped"]
    if not lost:
        return None
    named = ", ".join(str(event["index"]) for event in lost[:_NAMED] if "index" in event)
    figures = {"samples_skipped": evidence.num_events("sample_skipped"), "_named": named or None}
    return found("slow_samples", figures, case="left_out", is_note=True)


def slow_handover(evidence: Evidence, feeding: Feeding) -> Finding:
    """Returns a finding if workers are fast enough, and each step waits about equally long for a ready batch."""
    change = knobs(evidence, backend="threads") if evidence.record.loading.get("has_fetch") else ()
    figures: Figures = {**feeding.figures(), "handover_ms": _handover_ms(evidence), "_step_ms": feeding.step_ms}
    figures["_fetch"] = bool(change)
    gain = feeding.gain(feeding.num_workers) if change else None
    return found("slow_handover", figures, change, gain=gain, lost_frac=None if change else feeding.wait_frac)


_OF_CAUSES: dict[str, Callable[[Evidence, Feeding], Finding]] = {
    rule.__name__: rule
    for rule in (
        loading_in_main_process, too_few_workers, cpu_bound_loading, slow_storage, contended_loading, uneven_batches,
        slow_handover,
    )
}  # fmt: skip


def waiting_for_data(evidence: Evidence) -> Finding | None:
    """Returns the finding on the cause for which steps wait for data."""
    feeding, rule = feeding_of(evidence), _OF_CAUSES.get(cause_of_waiting(evidence) or "")
    return None if feeding is None or rule is None else rule(evidence, feeding)


_AHEAD = 2
"""Number of batches copied ahead, as in the plan. It hides a copy as long as a step."""
_LATENCY_MS, _SLOWEST_GB_S = 0.5, 0.02
"""Longest start and lowest rate of a copy, with much room: pageable memory goes over PCIe at 1 GB/s and more. Something
else holds up what takes longer."""


def slow_copy(evidence: Evidence) -> Finding | None:
    """Returns a finding if a step waits for its copy, which could overlap with the previous step or, if it does, takes
    as long as a step."""
    record, copy_frac, step_ms = evidence.record, evidence.copy_frac, evidence.steps.mean_ms or 0.0
    behind = feeding_of(evidence) if cause_of_waiting(evidence) == "slow_copy" else None
    is_long = copy_frac > limits.COPY_FRAC and evidence.steps.num_measured >= limits.FEWEST_STEPS and step_ms > 0
    if behind is None and not is_long:
        return None
    lost_frac = copy_frac if behind is None else behind.wait_frac
    copy_ms = copy_frac * step_ms if behind is None else evidence.steps.median("copy_ahead_ms") or 0.0
    figures: Figures = {"copy_frac" if behind is None else "wait_frac": lost_frac, "copy_ms": copy_ms}
    figures["_ahead"] = behind is not None
    mib, parts = record.loading.get("batch_mib"), evidence.steps.column("num_micro")
    if mib:
        # A script that accumulates gradients copies each part by itself.
        num_copies = int(np.median(parts)) if is_script(record) and len(parts) else 1
        rate = num_copies * mib * MIB / 1e6 / copy_ms
        figures |= {"batch_mib": mib, "copy_gb_per_s": rate, "_copied_mib": num_copies * mib}
        is_simulated = any(gpu.get("is_simulated") for gpu in record.machine.get("gpus") or ())
        if not is_simulated and copy_ms > num_copies * (_LATENCY_MS + mib * MIB / 1e6 / _SLOWEST_GB_S):
            return found("slow_copy", figures, case="held_up", lost_frac=lost_frac)
    is_pageable = evidence.value("loader.pin_memory") is False
    pinned = knobs(evidence, pin_memory=True) if is_pageable else ()
    is_own_stream = any(event.get("message") == OWN_STREAM for event in record.events)
    is_ahead = is_own_stream or bool(evidence.value("loader.device_prefetch"))
    # Batches are copied ahead if they are built ahead. A script copies them in code of its own.
    has_fetch = record.loading.get("has_fetch", False) and not has_unused_fetch(evidence)
    may_be_ahead = (evidence.num_workers > 0 or has_fetch) and "loader.device_prefetch" not in record.refused
    can_be_ahead = not is_ahead and (may_be_ahead or is_script(record))
    ahead = (f"loader.device_prefetch={_AHEAD}",) if can_be_ahead else ()
    change = (*pinned, *ahead)
    whys = ["its memory is not page-locked"] * bool(pinned) + ["nothing is copied ahead"] * bool(ahead)
    figures |= {"_why": " and ".join(whys) or None, "_pageable": is_pageable}
    figures |= {"_is_ahead": is_ahead and not change, "_stuck": not is_ahead and not change}
    # Page-locked memory alone makes a copy faster, and hides nothing.
    is_hidden = bool(change) and behind is None and (bool(ahead) or is_ahead)
    gain = _hidden(copy_frac, evidence) if is_hidden else None
    return found("slow_copy", figures, change, gain=gain, lost_frac=None if gain else lost_frac)


def _hidden(copy: float, evidence: Evidence) -> Gain:
    """Returns the gain of copies beside the step, limited by copies and launching where they take longer."""
    launched_frac = (evidence.steps.median("launch_ms") or 0.0) / (evidence.steps.mean_ms or 1.0)
    best = 1 / (1 - min(copy, 0.99))
    factor = max(1.0, min(best, 1 / copy, 1 / max(launched_frac, 0.01)))
    return Gain(factor, 1 + 0.5 * (factor - 1), best)


def slow_start(evidence: Evidence) -> Finding | None:
    """Returns a note if much of the time is lost once: before the first step, in the warm-up, after the last step."""
    wall, lost_s = evidence.wall.entry, evidence.wall.once_s
    if wall is None or lost_s < max(limits.SLOW_START_S, limits.SLOW_START_FRAC * wall["total_s"]):
        return None
    parts_s = {"start_s": wall["start_s"], "warmup_s": lost_s - wall["start_s"] - wall["end_s"], "end_s": wall["end_s"]}
    places = (
        "before the first step",
        "in the warm-up (compiling, claiming memory, starting workers)",
        "after the last",
    )
    parts = zip(parts_s.values(), places, strict=True)
    shown = [f"{show_duration(part_s)} {place}" for part_s, place in parts if part_s > 0.1 * lost_s]
    figures: Figures = {**parts_s, "training_s": wall["total_s"], "_lost_s": lost_s, "_parts": ", ".join(shown)}
    return found("slow_start", figures, is_note=True)


_FEWEST_STARTS = 3


def restarted_workers(evidence: Evidence) -> Finding | None:
    """Returns a finding if the first batches of epochs, for which workers are started anew, are late by at least
    `PAUSE_FRAC` of the time."""
    backend, starts = evidence.value("loader.backend"), np.flatnonzero(np.diff(evidence.steps.column("epoch")) > 0) + 1
    if evidence.value("loader.persistent_workers") is not False or backend in ("threads", "inline"):
        return None
    wait_ms, step_ms = evidence.steps.wait_ms, evidence.steps.mean_ms
    if evidence.num_workers == 0 or len(starts) < _FEWEST_STARTS or not step_ms:
        return None
    late_ms = max(0.0, float(np.median(wait_ms[starts])) - float(np.median(np.delete(wait_ms, starts))))
    frac = late_ms * len(starts) / (step_ms * len(wait_ms) + float(evidence.steps.gap_ms.sum()))
    if frac < limits.PAUSE_FRAC:
        return None
    # The first batch has to be built in any case.
    won_frac = frac - min(1.0, (evidence.record.loading.get("build_ms_mean") or 0.1 * late_ms) / late_ms) * frac
    figures: Figures = {"restart_frac": frac, "late_ms": late_ms, "epochs_begun": len(starts)}
    # Workers of the engine are renewed after a change of the dataset.
    figures |= {"_length": evidence.swings.lags.get("epoch", 0), "_own": backend == "own"}
    way_out = loader_change(evidence, persistent_workers=True)
    return found("restarted_workers", figures, gain=Gain.of_time(won_frac, 0.5 * won_frac, frac), **way_out)
