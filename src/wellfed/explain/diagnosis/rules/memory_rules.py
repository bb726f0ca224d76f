"""Finds device or host memory that is full, grows, or is left unused."""

from __future__ import annotations

from typing import Any

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding, Gain
from wellfed.explain.diagnosis.gains.device_load import DeviceLoad, device_load, has_run_out, memory_frac, merge
from wellfed.explain.diagnosis.gains.feeding import knobs, ready_mib
from wellfed.explain.diagnosis.rules.compute_rules import tensor_cores_idle
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.observe.telemetry.series import HOST
from wellfed.units import MIB, counted, show_bytes, show_duration, show_gib, show_percent

_MICRO_BATCH, _CHECKPOINTING = "memory.micro_batch", "memory.checkpoint_activations"
_KINDS = ("oom", "step_down", "ladder", "restart")
_SMALLER = "Make the model or its samples smaller, or take a larger card."
"""Advice where no knob saves device memory."""


def device_memory_full(evidence: Evidence) -> Finding | None:
    """Returns a finding if a step, or an evaluation, did not fit in the memory of the card."""
    record = evidence.record
    events = [event for event in record.events if event["kind"] in _KINDS]
    if (record.status != "oom" and not events) or memory_creeps(evidence) is not None:
        return None  # memory_creeps reports endless growth
    if record.status == "oom" and record.error is not None and record.error["kind"] == "host_oom":
        return None  # host_memory_full reports it
    steps = sorted({int(event.get("step") or 0) for event in events if event["kind"] != "restart"})
    ooms = sum(event["kind"] == "oom" for event in events)
    figures: Figures = {"times": max(ooms, 1), "steps": len(steps)}
    peak, budget = record.memory.get("measured_peak_gib"), record.memory.get("budget_gib")
    room = f" ({show_gib(peak)} of a budget of {show_gib(budget)} at most)" if peak and budget else ""
    if peak and budget:
        figures |= {"peak_gib": peak, "budget_gib": budget}
    sizes = [event["micro_batch"] for event in events if event.get("micro_batch")]
    tried = sizes[-1] if sizes else evidence.value("memory.micro_batch")
    micro = int(tried) if isinstance(tried, int | float) else None
    of_size = f" with micro-batches of {micro}" if micro else ""
    if record.status == "oom":
        message = f"Device memory did not suffice{of_size}{room}, and the run ended there."
        change = _less(evidence, micro)
        return Finding("device_memory_full", message, figures, change, lost_frac=1.0, advice=_SMALLER * (not change))
    first = f"first in step {steps[0]}" if steps else "once"
    how = f"ran out {counted(max(ooms, 1), 'time')}, {first}"
    (change, went), lost = _as_it_ended(events), _lost_frac(evidence, steps)
    message = f"Device memory {how}{room}. {went}"
    figures |= {"lost_frac": lost}
    return Finding("device_memory_full", message, figures, change, lost_frac=lost, advice=_SMALLER * (not change))


def _less(evidence: Evidence, micro: int | None) -> tuple[str, ...]:
    """Returns overrides that need less memory, cheapest first. The samples of a step stay the same."""
    may_lower = evidence.record.memory.get("may_lower", [_MICRO_BATCH, _CHECKPOINTING])
    if micro is not None and micro > 1 and _MICRO_BATCH in may_lower:
        on_oom = evidence.record.plan.get("memory.on_oom")
        was_asked_to_fail = on_oom is not None and (on_oom["value"], on_oom["source"]) == ("fail", "set")
        retry = ("memory.on_oom=retry",) if was_asked_to_fail else ()
        return (f"{_MICRO_BATCH}={micro // 2}", "memory.accumulate=null", *retry)
    if evidence.value(_CHECKPOINTING) is not True and _CHECKPOINTING in may_lower:
        return (f"{_CHECKPOINTING}=true",)
    is_held = evidence.value("memory.features") in ("cache", "cache_host")
    return ("memory.features=dynamic",) if is_held else ()


def _as_it_ended(events: list[dict[str, Any]]) -> tuple[tuple[str, ...], str]:
    """Returns overrides to start with the settings that the run ended with, and how it continued as text."""
    wanted: dict[str, Any] = {}
    for event in events:
        if event.get("micro_batch"):
            wanted |= {"memory.micro_batch": event["micro_batch"], "memory.accumulate": "null"}
        elif event["kind"] == "restart":
            planned = {knob: value for knob, value in event["changes"].items() if knob != "memory.accumulate"}
            wanted |= planned | ({"memory.accumulate": "null"} if "memory.micro_batch" in planned else {})
        elif event.get("evaluation_batch"):
            wanted["workload.eval_batch_size"] = event["evaluation_batch"]
        elif event.get("change"):
            knob, _, value = str(event["change"]).partition("=")
            wanted[knob] = value
    is_restarted = any(event["kind"] == "restart" for event in events)
    restarted = "The run continued from its last checkpoint"
    if not wanted:
        return (), f"{restarted}." if is_restarted else "The run continued without a change."
    again = restarted if is_restarted else "What did not fit was repeated"
    typed = {knob: str(value).lower() if isinstance(value, bool) else value for knob, value in wanted.items()}
    # The optimizer's node has no schema, and may lack the key.
    change = tuple(f"{'++' * knob.startswith('workload.optimizer.')}{knob}={value}" for knob, value in typed.items())
    is_smaller = not wanted.keys().isdisjoint(("memory.micro_batch", "workload.eval_batch_size"))
    return change, f"{again}{' in smaller parts' * is_smaller}, and the run kept these settings."


def _lost_frac(evidence: Evidence, steps: list[int]) -> float:
    """Returns the extra time of repeated steps over the time of all steps."""
    numbers = evidence.all_steps.get("step", np.empty(0))
    took, again = evidence.steps.all_ms, np.isin(numbers, steps)
    if len(took) != len(again) or not again.any() or again.all():
        return 0.0
    return float(np.maximum(took[again] - np.median(took[~again]), 0).sum() / took.sum())


def host_memory_full(evidence: Evidence) -> Finding | None:
    """Returns a finding if the run ended for lack of host memory, or held nearly all of it."""
    record = evidence.record
    error, machine, (holder, held) = record.error, record.machine, _most_held(evidence)
    shm, figures = record.host.get("shm_gib"), Figures()
    has_ended = error is not None and error["kind"] in ("host_oom", "worker")
    ram_gib, shm_gib = machine.get("ram_gib"), machine.get("shm_gib")
    is_full = bool(held and ram_gib and held >= limits.MEMORY_FULL_FRAC * ram_gib)
    is_shm_full = bool(shm and shm_gib and shm >= limits.MEMORY_FULL_FRAC * shm_gib)
    if not (has_ended or is_full or is_shm_full):
        return None
    text = []
    if error is not None and has_ended:
        was_killed = "Worker processes failed, mostly for lack of host memory or /dev/shm"
        text.append(was_killed if error["kind"] == "worker" else "The run ended for lack of host memory")
        figures["error"] = error["kind"]
    if held and ram_gib:
        text.append(f"{holder} held {show_gib(held)} of {show_gib(ram_gib)}")
        figures |= {"rss_gib": held, "ram_gib": ram_gib}
    if is_shm_full and shm and shm_gib:
        text.append(f"/dev/shm had {show_gib(shm)} of {show_gib(shm_gib)} in use")
        figures |= {"shm_used_gib": shm, "shm_gib": shm_gib}
    workers, prefetch = evidence.num_workers, evidence.value("loader.prefetch_factor") or 2
    ready = ready_mib(evidence, workers) if workers else None
    if workers:
        size = "" if ready is None else f", {show_bytes(ready * MIB)}"
        text.append(f"{counted(workers, 'worker')} keep {workers * prefetch} batches ready{size}")
    message = "; ".join(text)
    change: tuple[str, ...] = ()
    if workers:  # half the workers, and half the ready batches of each
        change += knobs(evidence, num_workers=workers // 2) if workers > 1 else ()
        change += knobs(evidence, prefetch_factor=prefetch // 2) if prefetch > 1 else ()
    advice = "Keep less in memory: open files when a sample is read, by mmap, and leave no copies in the Dataset."
    if workers:
        advice = f"Give the DataLoader num_workers={workers // 2}, or batches of fewer samples."
    return Finding(
        "host_memory_full",
        f"{message[0].upper()}{message[1:]}. This is host memory, not the GPU's.",
        {**figures, "num_workers": workers},
        change,
        lost_frac=1.0 if has_ended else None,
        advice="" if change else advice,
    )


def _most_held(evidence: Evidence) -> tuple[str, float | None]:
    """Returns who held host memory, as text, and the most GiB of it; None if unknown.

    The sum over the run's processes counts shared pages once for each. If it exceeds the memory that all programs used,
    that memory is returned.
    """
    ram_gib, own = evidence.record.machine.get("ram_gib"), evidence.record.host.get("rss_gib")
    rss, available = (evidence.telemetry.curve(name) for name in ("rss_gib", "ram_available_gib"))
    if ram_gib and len(rss) and len(available) and (used_gib := ram_gib - float(available.min())) > 0:
        return ("the run", most) if (most := float(rss.max())) <= used_gib else ("all programs", used_gib)
    return "the training process", own if own and ram_gib and own <= ram_gib else None


_BLOCKS = 5
_LEAST_OF_MEAN = 0.25
"""Minimum growth of each block over the mean growth. Less means that the growth has ended."""


def memory_creeps(evidence: Evidence) -> Finding | None:
    """Returns a finding if the growth never ends, unlike a cache that fills."""
    machine = evidence.record.machine
    sizes = {str(gpu.get("index", "")): gpu.get("memory_gib") for gpu in machine.get("gpus") or [] if "index" in gpu}
    for gpu in evidence.telemetry.gpus:
        found = _growth(evidence, "mem_used_gib", gpu, sizes.get(str(gpu)))
        if found is not None:
            why = (
                "Something keeps tensors of past steps (a list of losses that were not detached), or batches of "
                "ever new lengths leave gaps, which gpu.allocator=expandable avoids."
            )
            return _finding(f"Memory in use on GPU {gpu}", found, why, ended=evidence.record.status == "oom")
    # Pages of a memory map count when first read, so in the first epoch they grow without a leak.
    if len(epochs := evidence.steps.column("epoch")) and np.nanmax(epochs) >= 1:
        found = _growth(evidence, "rss_gib", HOST, machine.get("ram_gib"))
        if found is not None:
            why = "Something keeps what past steps or samples made: a list, or a cache without a limit."
            return _finding("Host memory of this run", found, why, ended=False)
    return None


def _finding(what: str, growth: tuple[float, float, float], why: str, *, ended: bool) -> Finding:
    start_gib, end_gib, left_s = growth
    text = f"{what} grew from {show_gib(start_gib)} to {show_gib(end_gib)} and was still growing"
    text += ", until it was full" if ended else f": at this rate it is full after {show_duration(left_s)} more"
    return Finding(
        "memory_creeps",
        f"{text}.",
        {"start_gib": start_gib, "end_gib": end_gib, "full_in_s": 0.0 if ended else left_s},
        lost_frac=1.0 if ended else 0.0,
        advice=why,
    )


def _growth(evidence: Evidence, name: str, gpu: int, size_gib: float | None) -> tuple[float, float, float] | None:
    """Returns the first and last GiB, and the seconds until it is full; None if growth is too small or has ended."""
    curve = evidence.curves.get(gpu, {})
    used, time_s = curve.get(name, np.empty(0)), curve.get("time_s", np.empty(0))
    known = np.isfinite(used) & np.isfinite(time_s) if len(used) == len(time_s) else np.zeros(0, bool)
    if not size_gib or known.sum() < 2 * limits.CREEP_WINDOW:
        return None
    used, time_s = used[known], time_s[known]
    smooth: Series = np.convolve(used, np.full(limits.CREEP_WINDOW, 1 / limits.CREEP_WINDOW), "valid")
    rose = float(smooth[-1] - smooth[0])
    if rose < limits.CREEP_FRAC * size_gib:
        return None
    levels = np.array([np.median(block) for block in np.array_split(used[len(used) // 10 :], _BLOCKS)])
    steps = np.diff(levels)
    if steps.min() < _LEAST_OF_MEAN * max(steps.mean(), 1e-9):
        return None
    rate = rose / float(time_s[-1] - time_s[0])
    return float(smooth[0]), float(used[-1]), max(0.0, size_gib - float(used[-1])) / rate


_RECOMPUTED_FRAC = 0.25
"""Share of recomputation in forward and backward: one forward pass of four."""


def memory_unused(evidence: Evidence) -> Finding | None:
    """Returns a finding if features could be kept on the device, activations kept, or micro-batches merged.
    `small_batch` reports split steps that leave the card half empty, this rule those that leave it less than full."""
    load, used = device_load(evidence), memory_frac(evidence)
    if load is None or used is None or used >= limits.MEMORY_USED_FRAC or has_run_out(evidence):
        return None
    way_out = _way_out(evidence, load)
    if way_out is None:
        return None
    why, change, gain = way_out
    peak, budget = evidence.record.memory["measured_peak_gib"], evidence.record.memory.get("budget_gib") or 0.0
    return Finding(
        "memory_unused",
        f"{show_percent(used)} of the GPU memory budget is used at most ({show_gib(peak)} of {show_gib(budget)}), "
        f"while {why}.",
        {"memory_frac": used, "full_frac": load.full_frac},
        change,
        gain=gain,
    )


def _table_fits(evidence: Evidence) -> bool:
    """Returns whether the table of all features surely fits into the budget beside the run's peak."""
    memory = evidence.record.memory
    table_gib, budget_gib = memory.get("feature_table_gib"), memory.get("budget_gib") or 0.0
    return table_gib is not None and memory["measured_peak_gib"] + table_gib <= limits.MEMORY_FULL_FRAC * budget_gib


def _way_out(evidence: Evidence, load: DeviceLoad) -> tuple[str, tuple[str, ...], Gain | None] | None:
    """Returns what saves memory in this run, the overrides without it, and their gain."""
    # Only if requested: the plan keeps features on the device if they fit, and checkpoints only if nothing else fits. A
    # trained encoder has no fixed features.
    plan = evidence.record.plan
    features, checkpointing = plan.get("memory.features"), plan.get(_CHECKPOINTING)
    is_set = features is not None and features["source"] == "set"
    if features is not None and is_set and features["value"] in ("cache_host", "dynamic") and _table_fits(evidence):
        return "features are kept off the device", ("memory.features=cache",), None
    if checkpointing is not None and checkpointing["value"] is True and checkpointing["source"] == "set":
        least, most = (1 / (1 - share * load.busy_frac) for share in (_RECOMPUTED_FRAC, 1.2 * _RECOMPUTED_FRAC))
        return "activations are computed twice", (f"{_CHECKPOINTING}=false",), Gain(least, 1.0, most)
    merged = merge(evidence)
    if merged is None or load.limit is not None or (load.sm_frac is not None and load.full_frac >= limits.SM_FULL_FRAC):
        return None
    if tensor_cores_idle(evidence) is not None:  # the larger loss is reported first
        return None
    gain = merged.gain(load)
    why = f"each step is split into {merged.parts_before} micro-batches"
    if load.sm_frac is None:  # the load of the card is unknown
        return why, merged.change, None
    return None if gain.factor < limits.LEAST_DEVICE_GAIN else (f"{why} that don't fill the card", merged.change, gain)
