"""Finds device or host memory that is full, grows, or is left unused."""

from __future__ import annotations

from typing import Any

import numpy as np

from wellfed.explain.diagnosis import thresholds as limits
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Finding, Gain, found
from wellfed.explain.diagnosis.gains.device_load import device_load, has_run_out, memory_frac
from wellfed.explain.diagnosis.gains.feeding import knobs, ready_mib
from wellfed.explain.diagnosis.run_tables import Series
from wellfed.explain.diagnosis.words import Figures
from wellfed.observe.telemetry.series import HOST

_MICRO_BATCH, _CHECKPOINTING = "memory.micro_batch", "memory.checkpoint_activations"
_KINDS = ("oom", "step_down", "ladder", "restart")


def device_memory_full(evidence: Evidence) -> Finding | None:
    """Returns a finding if a step, or an evaluation, did not fit in the memory of the card."""
    record = evidence.record
    events = [event for event in record.events if event["kind"] in _KINDS]
    if (record.status != "oom" and not events) or _grew(evidence) or memory_creeps(evidence) is not None:
        return None  # memory_creeps reports endless growth
    if record.status == "oom" and record.error is not None and record.error["kind"] == "host_oom":
        return None  # host_memory_full reports it
    steps = sorted({int(event.get("step") or 0) for event in events if event["kind"] != "restart"})
    times = max(1, sum(event["kind"] == "oom" for event in events))
    figures: Figures = {"times": times, "steps": len(steps)}
    figures |= {"peak_gib": record.memory.get("measured_peak_gib"), "budget_gib": record.memory.get("budget_gib")}
    if record.status == "oom":
        sizes = [event["micro_batch"] for event in events if event.get("micro_batch")]
        tried = sizes[-1] if sizes else evidence.value(_MICRO_BATCH)
        micro = int(tried) if isinstance(tried, int | float) else None
        change = _less(evidence, micro)
        return found("device_memory_full", figures | {"_micro": micro}, change, lost_frac=1.0)
    change = _as_it_ended(events)
    is_smaller = any(override.startswith((_MICRO_BATCH, "workload.eval_batch_size")) for override in change)
    figures |= {"_first": f"first in step {steps[0]}" if steps else "once", "_smaller": is_smaller}
    figures["_restarted"] = any(event["kind"] == "restart" for event in events)
    return found("device_memory_full", figures, change, case="retried")


def _grew(evidence: Evidence) -> bool:
    """Returns whether the error says that memory grew with every step, which nothing but the user's code can change."""
    error = evidence.record.error
    return error is not None and "Memory grew with every step" in error["message"]


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


def _as_it_ended(events: list[dict[str, Any]]) -> tuple[str, ...]:
    """Returns overrides to start with the settings that the run ended with."""
    wanted: dict[str, Any] = {}
    for event in events:
        if event.get("micro_batch"):
            wanted |= {_MICRO_BATCH: event["micro_batch"], "memory.accumulate": "null"}
        elif event["kind"] == "restart":
            wanted |= event["changes"]
        elif event.get("evaluation_batch"):
            wanted["workload.eval_batch_size"] = event["evaluation_batch"]
        elif event.get("change"):
            knob, _, value = str(event["change"]).partition("=")
            wanted[knob] = value
    if _MICRO_BATCH in wanted:
        wanted["memory.accumulate"] = "null"
    typed = {knob: str(value).lower() if isinstance(value, bool) else value for knob, value in wanted.items()}
    # The optimizer's node has no schema, and may lack the key.
    return tuple(f"{'++' * knob.startswith('workload.optimizer.')}{knob}={value}" for knob, value in typed.items())


def host_memory_full(evidence: Evidence) -> Finding | None:
    """Returns a finding if the run ended for lack of host memory, or held nearly all of it."""
    record, machine, (holder, held) = evidence.record, evidence.record.machine, _most_held(evidence)
    error = record.error["kind"] if record.error is not None else ""
    ended, ram_gib = error if error in ("host_oom", "worker") else None, machine.get("ram_gib")
    is_full = bool(held and ram_gib and held >= limits.MEMORY_FULL_FRAC * ram_gib)
    if not (ended or is_full) or _grew(evidence):
        return None
    workers, prefetch = evidence.num_workers, evidence.value("loader.prefetch_factor") or 2
    figures: Figures = {"error": ended, "rss_gib": held, "ram_gib": ram_gib, "num_workers": workers}
    figures |= {"_worker": ended == "worker", "_run": ended == "host_oom", "_holder": holder}
    figures |= {"_ready": workers * prefetch or None, "_ready_mib": ready_mib(evidence, workers) or None}
    figures |= {"_fewer": workers // 2 if workers else None, "_any": bool(workers), "_none": not workers}
    # Half the workers, and half the ready batches of each.
    change = knobs(evidence, num_workers=workers // 2) if workers > 1 else ()
    change += knobs(evidence, prefetch_factor=prefetch // 2) if workers and prefetch > 1 else ()
    return found("host_memory_full", figures, change, lost_frac=1.0 if ended else None)


def _most_held(evidence: Evidence) -> tuple[str, float | None]:
    """Returns who held host memory, as text, and the most GiB of it; None if unknown.

    The sum over the run's processes counts shared pages once for each. If it exceeds the memory that all programs used,
    that memory is returned.
    """
    ram_gib, own = evidence.record.machine.get("ram_gib"), evidence.record.host.get("rss_gib")
    rss, available = (evidence.telemetry.curve(name) for name in ("rss_gib", "ram_available_gib"))
    if ram_gib and len(rss) and len(available) and (used_gib := ram_gib - float(available.min())) > 0:
        return ("The run", most) if (most := float(rss.max())) <= used_gib else ("All programs", used_gib)
    return "The training process", own if own and ram_gib and own <= ram_gib else None


_BLOCKS = 5
_LEAST_OF_MEAN = 0.25
"""Minimum growth of each block over the mean growth. Less means that the growth has ended."""


def memory_creeps(evidence: Evidence) -> Finding | None:
    """Returns a finding if the growth never ends, unlike a cache that fills."""
    machine, ended = evidence.record.machine, evidence.record.status == "oom"
    sizes = {str(gpu.get("index", "")): gpu.get("memory_gib") for gpu in machine.get("gpus") or [] if "index" in gpu}
    for gpu in evidence.telemetry.gpus:
        if (growth := _growth(evidence, "mem_used_gib", gpu, sizes.get(str(gpu)))) is not None:
            figures: Figures = {**growth, "gpu": gpu, "_ended": ended, "_goes_on": not ended}
            return found("memory_creeps", figures, lost_frac=1.0 if ended else 0.0)
    # Pages of a memory map count when first read, so in the first epoch they grow without a leak.
    epochs = evidence.steps.column("epoch")
    growth = _growth(evidence, "rss_gib", HOST, machine.get("ram_gib")) if np.nanmax(epochs, initial=0) >= 1 else None
    return None if growth is None else found("memory_creeps", growth, case="of_host", lost_frac=0.0)


def _growth(evidence: Evidence, name: str, gpu: int, size_gib: float | None) -> Figures | None:
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
    steps = np.diff([np.median(block) for block in np.array_split(used[len(used) // 10 :], _BLOCKS)])
    if steps.min() < _LEAST_OF_MEAN * max(steps.mean(), 1e-9):
        return None
    left_s = max(0.0, size_gib - float(used[-1])) / rose * float(time_s[-1] - time_s[0])
    return {"start_gib": float(smooth[0]), "end_gib": float(used[-1]), "full_in_s": left_s}


_RECOMPUTED_FRAC = 0.25
"""Share of recomputation in forward and backward: one forward pass of four."""


def memory_unused(evidence: Evidence) -> Finding | None:
    """Returns a finding if features could be kept on the device, or activations kept, and are not since the user asked
    for that. The plan does so only where nothing else fits."""
    load, used, memory = device_load(evidence), memory_frac(evidence), evidence.record.memory
    if load is None or used is None or used >= limits.MEMORY_USED_FRAC or has_run_out(evidence):
        return None
    typed = {knob: one["value"] for knob, one in evidence.record.plan.items() if one["source"] == "set"}
    peak_gib, table_gib = memory["measured_peak_gib"], memory.get("feature_table_gib")
    budget_gib = memory.get("budget_gib") or 0.0
    figures: Figures = {"memory_frac": used, "full_frac": load.full_frac}
    figures |= {"_peak_gib": peak_gib, "_budget_gib": budget_gib}
    fits = table_gib is not None and peak_gib + table_gib <= limits.MEMORY_FULL_FRAC * budget_gib
    if fits and typed.get("memory.features") in ("cache_host", "dynamic"):
        return found("memory_unused", figures, ("memory.features=cache",), case="features")
    if typed.get(_CHECKPOINTING) is not True:
        return None
    least, most = (1 / (1 - share * load.busy_frac) for share in (_RECOMPUTED_FRAC, 1.2 * _RECOMPUTED_FRAC))
    return found("memory_unused", figures, (f"{_CHECKPOINTING}=false",), gain=Gain(least, 1.0, most))
