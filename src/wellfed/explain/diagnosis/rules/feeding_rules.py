"""Finds why steps wait for their batches: workers, CPU, storage, uneven or slow samples, handover, copy, start."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.gains.device_load import launch_ms
from wellfed.explain.diagnosis.gains.feeding import (
    copies_ahead,
    feeding_of,
    has_unused_fetch,
    knobs,
    loader_change,
    may_copy_ahead,
    planned_anew,
    workers_take_cores,
)
from wellfed.explain.diagnosis.gains.pauses import gain_of, pauses
from wellfed.explain.diagnosis.script_words import is_script
from wellfed.explain.diagnosis.waiting import (
    CauseOfWaiting,
    cause_of_waiting,
    cold_over_warm,
    copy_ahead_ms,
    handover_ms,
    has_slow_builds,
    latency_of,
    prefetch_needed,
    slow_twice,
    way_out_of_latency,
)
from wellfed.units import MIB, counted, show_bytes, show_duration, show_factor, show_ms, show_percent

_UNUSED_FETCH = ". The data has fetch, which builds whole batches, but the loader requests single samples."
_FETCH_FRAC = 0.1
"""Maximum time to fetch a whole batch over the time for its samples one by one (record loader_cpu)."""


def _if_it_is_the_cause(
    word: Callable[[Evidence, CauseOfWaiting], Finding | None],
) -> Callable[[Evidence], Finding | None]:
    """Makes a rule of a function that words the waiting of a run if its name is the cause."""

    @wraps(word)
    def rule(evidence: Evidence) -> Finding | None:
        waiting = cause_of_waiting(evidence)
        return word(evidence, waiting) if waiting is not None and waiting.cause == word.__name__ else None

    return rule


@_if_it_is_the_cause
def loading_in_main_process(evidence: Evidence, waiting: CauseOfWaiting) -> Finding | None:
    """Returns a finding if there are no workers, and workers could build beside the step."""
    feeding = waiting.feeding
    text = (
        f"{waiting.share_text}: the training process builds a batch itself in {show_ms(feeding.build_ms)}, and a step "
    )
    text += f"takes {show_ms(feeding.fed_ms)}"
    if has_unused_fetch(evidence) and not feeding.waits_outside:
        low = feeding.step_ms / (feeding.fed_ms + _FETCH_FRAC * feeding.build_ms)
        gain = Gain(feeding.bound, min(low, feeding.bound), feeding.bound)
        text += _UNUSED_FETCH
        way_out: dict[str, Any] = {"change": planned_anew(evidence)}
    else:
        advised = feeding.workers_advised
        gain = feeding.gain(advised)
        text += f"; {feeding.show_need()}, none is set.{feeding.show_doubt()}"
        stop = evidence.record.config.get("loader", {}).get("persistent_workers") is False
        stays = {"persistent_workers": True} if stop else {}
        way_out = loader_change(evidence, backend="auto", num_workers=advised, **stays)
    return Finding("loading_in_main_process", text, feeding.figures(), gain=gain, **way_out)


@_if_it_is_the_cause
def too_few_workers(evidence: Evidence, waiting: CauseOfWaiting) -> Finding | None:
    """Returns a finding if more workers would build batches faster."""
    feeding = waiting.feeding
    advised, workers = feeding.workers_advised, feeding.num_workers
    about = "about " if feeding.is_estimate else ""
    text = (
        f"{waiting.share_text}: one worker builds a batch in "
        f"{about}{show_ms(feeding.build_ms)}, a step takes {show_ms(feeding.fed_ms)}; {feeding.show_need()}, "
        f"{workers} {'is' if workers == 1 else 'are'} set."
    )
    if feeding.step_ms_with(advised) > 1.1 * feeding.fed_ms:
        text += f" Then all {feeding.cores:g} cores are full, and steps still wait."
    text += feeding.show_doubt()
    way_out = loader_change(evidence, num_workers=advised)
    return Finding("too_few_workers", text, feeding.figures(), gain=feeding.gain(advised), **way_out)


@_if_it_is_the_cause
def cpu_bound_loading(evidence: Evidence, waiting: CauseOfWaiting) -> Finding | None:
    """Returns a finding if more workers would only share the same cores."""
    feeding = waiting.feeding
    text = f"{waiting.share_text}: building a batch takes {show_ms(feeding.build_cpu_ms)} of CPU, a step takes "
    text += show_ms(feeding.fed_ms)
    if has_unused_fetch(evidence):
        change, gain = planned_anew(evidence), Gain(feeding.bound, 1.0, feeding.bound)
        text += _UNUSED_FETCH
        return Finding("cpu_bound_loading", text, feeding.figures(), change, gain=gain, lost_frac=waiting.frac)
    cores = "the one core is full" if feeding.cores == 1 else f"all {feeding.cores:g} cores are full"
    if feeding.others >= 0.1 * feeding.cores:
        cores += f" ({feeding.others:.1f} of them with others' work)"
    text += f", and {cores}: more workers would only share them."
    advice = (
        "Make it cheaper: fetch for whole batches, augmentation in on_device, what is the same in each epoch prepared "
        "once. Store or decode pictures at the size that is used (a JPEG in Pillow's draft mode)."
    )
    return Finding("cpu_bound_loading", text, feeding.figures(), lost_frac=waiting.frac, advice=advice)


@_if_it_is_the_cause
def slow_storage(evidence: Evidence, waiting: CauseOfWaiting) -> Finding | None:
    """Returns a finding if building hardly uses the CPU, and there is evidence that it waits for the disk."""
    feeding, figures = waiting.feeding, waiting.feeding.figures()
    text = f"{waiting.share_text}: a batch takes {show_ms(feeding.build_ms)} to build, only "
    text += f"{show_percent(feeding.cpu_frac)} of it CPU time"
    iowait_pct, cold = evidence.telemetry.mean("iowait_pct"), cold_over_warm(evidence)
    if iowait_pct is not None:
        text += f"; cores stood idle for a disk in {iowait_pct:.0f} % of the time"
        figures["iowait_pct"] = iowait_pct
    if cold is not None:
        text += f"; in the first epoch it took {cold:.2g} times as long as later"
        figures["cold_over_warm"] = cold
    text += "."
    advice = "Keep the data on a local disk, in few large files, or in memory."
    needed = feeding.workers_advised
    gain = feeding.gain(needed)
    if needed <= feeding.num_workers or gain.factor < limits.LEAST_GAIN:
        return Finding("slow_storage", text, figures, lost_frac=waiting.frac, advice=advice)
    advice += " More workers read in parallel, which helps unless the disk is at its limit."
    change = knobs(evidence, num_workers=needed)
    return Finding("slow_storage", text, figures, change, gain=Gain(gain.factor, 1.0, gain.high), advice=advice)


@_if_it_is_the_cause
def contended_loading(evidence: Evidence, waiting: CauseOfWaiting) -> Finding | None:
    """Returns a finding if a batch takes far longer beside other workers than with one worker alone.

    That was timed before training, or workers were seen to wait for a lock that they share.
    """
    feeding, factor = waiting.feeding, waiting.feeding.contention or 1.0
    figures: Figures = {**feeding.figures(), "contention_factor": factor, "lock_frac": feeding.lock_frac}
    who = f"{waiting.share_text}. Its {feeding.num_workers} workers wait for one another"
    if feeding.lock_factor >= limits.CONTENTION_FACTOR:
        why = f"each waits for a lock that they share for {show_percent(feeding.lock_frac)} of the time"
    else:
        first = (
            "Python's own lock, as they are threads"
            if evidence.value("loader.backend") == "threads"
            else "a lock in the dataset"
        )
        why = (
            f"a batch takes {show_ms(feeding.build_ms)} to build, {show_factor(factor)} times as long as one worker "
            f"alone took, and {show_percent(feeding.cpu_frac)} of that is CPU time. They share {first}, a rate limit, "
            "or a store at its limit"
        )
    text = f"{who}: {why}. More workers don't help."
    advice = "Read without the lock, such as by a file that each worker opens, or from a local copy."
    return Finding("contended_loading", text, figures, lost_frac=waiting.frac, advice=advice)


def workers_take_the_cpu(evidence: Evidence) -> Finding | None:
    """Returns a finding if all cores are full, and steps are slowed down."""
    feeding = feeding_of(evidence)
    if feeding is None or not workers_take_cores(evidence):
        return None
    cores = evidence.cores or 1.0
    workers, fewer = feeding.num_workers, max(1, int(cores) - 1)
    ceiling, loader_pct = evidence.ceiling_factor, evidence.telemetry.mean("loader_cpu_pct")
    top = max(1.0, feeding.step_ms / feeding.fed_ms if ceiling is None else ceiling)
    text = f"{counted(workers, 'worker')} share {cores:g} cores with the steps"
    if loader_pct is not None:
        text += f" and take {show_percent(loader_pct / 100 / cores)} of them"
    if ceiling is not None:
        text += f": a step takes {show_ms(feeding.step_ms)}, and {show_ms(feeding.step_ms / ceiling)} in the ceiling"
    way_out: dict[str, Any] = {"advice": "Make batches cheaper: fetch for whole batches, augmentation in on_device."}
    if workers > fewer:
        way_out = loader_change(evidence, num_workers=fewer)
    gain = Gain(top, 1.0, top) if workers > fewer else None
    return Finding("workers_take_the_cpu", f"{text}.", feeding.figures(), gain=gain, lost_frac=1 - 1 / top, **way_out)


@_if_it_is_the_cause
def uneven_batches(evidence: Evidence, waiting: CauseOfWaiting) -> Finding | None:
    """Returns a finding if more batches kept ready would bridge the slow ones, or latency is random."""
    feeding = waiting.feeding
    if has_slow_builds(evidence, feeding):
        return _latency(evidence, waiting)
    needed = prefetch_needed(evidence, feeding)
    p99_ms = float(np.nanquantile(evidence.steps.column("build_ms"), 0.99))
    text = (
        f"{waiting.share_text}, though {counted(feeding.num_workers, 'worker')} "
        f"that build a batch in {show_ms(feeding.build_ms)} keep up with steps of {show_ms(feeding.fed_ms)} on "
        f"average. The slowest batches take {show_ms(p99_ms)}. {needed} batches kept ready by each worker bridge "
        f"that; now it keeps {feeding.prefetch}."
    )
    figures = {**feeding.figures(), "build_ms_p99": p99_ms}
    way_out = loader_change(evidence, prefetch_factor=needed)
    return Finding("uneven_batches", text, figures, gain=feeding.gain(feeding.num_workers, needed), **way_out)


def _latency(evidence: Evidence, waiting: CauseOfWaiting) -> Finding:
    """Returns the finding for batches that are far too late, with other samples each time."""
    feeding, (latency, of_latency, lost_frac) = waiting.feeding, latency_of(evidence, waiting)
    figures = {**feeding.figures(), **of_latency}
    text = f"{latency}: random latency, or slow samples that were not seen twice."
    found = way_out_of_latency(evidence, feeding)
    if found is None:
        advice = "Make the slowest reads faster: no queue that fits into memory bridges them."
        return Finding("uneven_batches", text, figures, lost_frac=lost_frac, advice=advice)
    workers, prefetch = found
    text += " Batches kept ready bridge some of that."
    ahead = {} if feeding.num_workers else {"backend": "auto"}
    way_out = loader_change(evidence, **ahead, num_workers=workers, prefetch_factor=prefetch)
    return Finding("uneven_batches", text, figures, gain=feeding.gain(workers, prefetch), **way_out)


_NAMED = 5


def slow_samples(evidence: Evidence) -> Finding | None:
    """Returns a finding if the same samples were slow in two epochs, or a note on samples that were left out."""
    waiting = cause_of_waiting(evidence)
    if waiting is None or waiting.cause != "slow_samples":
        return _left_out(evidence)
    repeated, (text, figures, lost_frac) = slow_twice(evidence), latency_of(evidence, waiting)
    named = ", ".join(map(str, sorted(repeated)[:_NAMED]))
    more = f" and {len(repeated) - _NAMED} more" if len(repeated) > _NAMED else ""
    return Finding(
        "slow_samples",
        f"{text}. The same samples were slow in more than one epoch: {named}{more}.",
        {**figures, "samples_slow_twice": len(repeated)},
        lost_frac=lost_frac,
        advice="Look at these samples; loader.skip_ids leaves them out.",
    )


def _left_out(evidence: Evidence) -> Finding | None:
    """Returns a note on samples that could not be loaded; None without such samples."""
    lost = [event for event in evidence.record.events if event["kind"] == "sample_skipped"]
    if not lost:
        return None
    number, indices = evidence.num_events("sample_skipped"), [one["index"] for one in lost[:_NAMED] if "index" in one]
    text = (
        f"{counted(number, 'sample')} could not be loaded and {'was' if number == 1 else 'were'} left out: "
        f"{', '.join(map(str, indices))}. Finding each of them took time."
    )
    advice = "loader.skip_ids leaves them out from the start."
    return Finding("slow_samples", text, {"samples_skipped": number}, advice=advice, is_note=True)


@_if_it_is_the_cause
def slow_handover(evidence: Evidence, waiting: CauseOfWaiting) -> Finding | None:
    """Returns a finding if workers are fast enough, and each step waits about equally long for a ready batch."""
    feeding, taken_ms = waiting.feeding, handover_ms(evidence)
    text = (
        f"{waiting.share_text}, though {counted(feeding.num_workers, 'worker')} "
        f"that build a batch in {show_ms(feeding.build_ms)} keep up: receiving a batch from a worker process takes "
        f"{show_ms(taken_ms)} of a step of {show_ms(feeding.step_ms)}"
    )
    figures = {**feeding.figures(), "handover_ms": taken_ms}
    change = knobs(evidence, backend="threads") if evidence.record.loading.get("has_fetch") else ()
    if change:
        text += ". The data has fetch, so threads can build whole batches in this process"
    gain = feeding.gain(feeding.num_workers) if change else None
    advice = "" if change else "Make batches of fewer and larger tensors. With a fetch in the data, threads avoid this."
    lost_frac = None if change else waiting.frac
    return Finding("slow_handover", f"{text}.", figures, change, gain=gain, lost_frac=lost_frac, advice=advice)


_AHEAD = 2
"""Number of batches copied ahead, as in the plan. It hides a copy as long as a step."""
_PINNED = 2.0
"""Least factor by which copies from page-locked memory are usually faster."""
_LATENCY_MS, _SLOWEST_GB_S = 0.5, 0.02
"""Longest start and lowest rate of a copy, with much room: pageable memory goes over PCIe at 1 GB/s and more. Something
else holds up what takes longer."""


def slow_copy(evidence: Evidence) -> Finding | None:
    """Returns a finding if a step waits for its copy, which could overlap with the previous step or, if it does, takes
    as long as a step."""
    waiting = cause_of_waiting(evidence)
    copy, mib = evidence.copy_frac, evidence.record.loading.get("batch_mib")
    parts = evidence.steps.column("num_micro")  # a script that accumulates gradients copies each by itself
    num_copies = int(np.median(parts)) if is_script(evidence.record) and len(parts) else 1
    if waiting is not None and waiting.cause == "slow_copy":
        copy, copy_ms = waiting.frac, copy_ahead_ms(evidence)
        figures: Figures = {"wait_frac": copy, "copy_ms": copy_ms}
        text = f"{show_percent(copy)} of each step waits for its batch to be copied to the GPU, which takes as long as "
        text += "the step"
        causes = ". Many small tensors in a batch, or the model's transfer_batch_to_device, may also cause this"
        gain: Gain | None = Gain(min(_PINNED, waiting.feeding.bound), 1.0, waiting.feeding.bound)
    elif copy <= limits.COPY_FRAC or evidence.steps.num_measured < limits.FEWEST_STEPS or not evidence.steps.mean_ms:
        return None
    else:
        copy_ms = copy * evidence.steps.mean_ms
        figures = {"copy_frac": copy, "copy_ms": copy_ms}
        text, causes = f"{show_percent(copy)} of each step is copying its batch to the GPU", ""
        gain = _hidden(copy, evidence)
    if mib:
        figures |= {"batch_mib": mib, "copy_gb_per_s": num_copies * mib * MIB / 1e6 / copy_ms}
        text += f": {show_bytes(num_copies * mib * MIB)} in {copy_ms:.2f} ms, {figures['copy_gb_per_s']:.2g} GB/s"
        is_simulated = any(gpu.get("is_simulated") for gpu in evidence.record.machine.get("gpus") or ())
        if not is_simulated and copy_ms > num_copies * (_LATENCY_MS + mib * MIB / 1e6 / _SLOWEST_GB_S):
            text += f". So small a copy takes microseconds: something else holds it up{causes}."
            advice = "Look for other programs on this GPU (nvidia-smi shows them)."
            return Finding("slow_copy", text, figures, lost_frac=copy, advice=advice)
    change: list[str] = []
    whys, is_pageable = [], evidence.value("loader.pin_memory") is False
    if is_pageable and (pinned := knobs(evidence, pin_memory=True)):
        change += pinned
        whys.append("its memory is not page-locked")
    is_ahead, may_be_ahead = copies_ahead(evidence), may_copy_ahead(evidence)
    if may_be_ahead:
        change.append(f"loader.device_prefetch={_AHEAD}")
        whys.append("nothing is copied ahead")
    if not change:
        ahead = "copies run ahead of the step already" if is_ahead else "no batch of this run can be copied ahead"
        advice = "Give the DataLoader pin_memory=True. " if is_pageable else ""
        advice += "Make batches smaller: uint8 or int16, converted to floats on the device (on_device)."
        return Finding("slow_copy", f"{text}, and {ahead}{causes}.", figures, lost_frac=copy, advice=advice)
    text += f"; {' and '.join(whys)}{causes}."
    if "copy_frac" in figures and not (is_ahead or may_be_ahead):
        gain = None  # page-locked memory makes it faster, and nothing hides it
    return Finding("slow_copy", text, figures, tuple(change), gain=gain, lost_frac=None if gain else copy)


def _hidden(copy: float, evidence: Evidence) -> Gain:
    """Returns the gain of copies beside the step, limited by copies and launching where they take longer."""
    launched_frac = (launch_ms(evidence) or 0.0) / (evidence.steps.mean_ms or 1.0)
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
    shown = [f"{show_duration(took_s)} {place}" for took_s, place in parts if took_s > 0.1 * lost_s]
    return Finding(
        "slow_start",
        f"{show_duration(lost_s)} of the {show_duration(wall['total_s'])} of training are lost once: "
        f"{', '.join(shown)}. A longer run loses no more.",
        {**parts_s, "training_s": wall["total_s"]},
        is_note=True,
    )


_FEWEST_STARTS = 3


def restarted_workers(evidence: Evidence) -> Finding | None:
    """Returns a finding if the first batches of epochs are late by at least `PAUSE_FRAC` of the time. Either the
    workers are started anew, or they begin with nothing ready, and the data could be fetched without them."""
    stays = evidence.value("loader.persistent_workers") is not False
    if evidence.num_workers == 0 or (stays and not has_unused_fetch(evidence)):
        return None
    starts = np.flatnonzero(np.diff(evidence.steps.column("epoch")) > 0) + 1
    wall_ms = (evidence.steps.mean_ms or 0.0) * len(evidence.steps.wait_ms) + float(evidence.steps.gap_ms.sum())
    if len(starts) < _FEWEST_STARTS or not wall_ms or evidence.value("loader.backend") in ("threads", "inline"):
        return None
    usual_ms = float(np.median(np.delete(evidence.steps.wait_ms, starts)))
    waited_ms = max(0.0, float(np.median(evidence.steps.wait_ms[starts])) - usual_ms)
    stopped_ms = max(0.0, float(np.median(evidence.steps.gap_ms[starts])) - _other_pauses_ms(evidence, len(starts) + 1))
    start_ms = waited_ms + stopped_ms
    frac = start_ms * len(starts) / wall_ms
    if frac < limits.PAUSE_FRAC:
        return None
    # The first batch has to be built in any case.
    kept_frac = min(1.0, (evidence.record.loading.get("build_ms_mean") or 0.1 * start_ms) / start_ms) * frac
    way_out: dict[str, Any] = {"change": ("loader=auto",)}
    if not stays:
        way_out = loader_change(evidence, persistent_workers=True)
    begin = "Workers begin each epoch with nothing ready" if stays else "Workers are started anew for each epoch"
    length = evidence.swings.lags.get("epoch", 0)
    text = (
        f"{begin}: its first step comes {show_duration(start_ms / 1e3)} late, "
        f"{show_percent(frac)} of the time at {counted(len(starts), 'start')} of {length} steps"
    )
    text += _UNUSED_FETCH if stays else "."
    if not stays and evidence.value("loader.backend") == "own":  # the engine's workers are renewed after a change
        text += " Workers that stay keep their copy of the dataset: what a hook changes between epochs is lost on them."
    return Finding(
        "restarted_workers",
        text,
        {"restart_frac": frac, "late_ms": start_ms, "epochs_begun": len(starts)},
        gain=gain_of(frac - kept_frac, 0.5 * (frac - kept_frac), frac),
        **way_out,
    )


def _other_pauses_ms(evidence: Evidence, epochs: int) -> float:
    """Returns the milliseconds of validations and checkpoints at the end of an epoch."""
    total_s = 0.0
    for phase, knob in (("validate", "validate_every_steps"), ("checkpoint", "checkpoint_every_steps")):
        spent = pauses(evidence, phase)
        if spent is None:
            continue
        if not evidence.value(f"trainer.{knob}"):
            total_s += spent.total_s
        elif evidence.record.wall is None:  # a watched script, where one may be at each end, and the knob is an average
            total_s += min(spent.total_s, epochs * spent.each_s)
    return 1e3 * total_s / epochs
