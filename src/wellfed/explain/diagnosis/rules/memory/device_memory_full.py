"""Finds that device memory ran out, and which settings would have been enough."""

from __future__ import annotations

from typing import Any

import numpy as np

from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import Figures, Finding
from wellfed.explain.diagnosis.rules.memory import memory_creeps
from wellfed.units import counted, show_gib

_MICRO_BATCH, _CHECKPOINTING = "memory.micro_batch", "memory.checkpoint_activations"
_KINDS = ("oom", "thrash", "step_down", "ladder", "restart")


def check(evidence: Evidence) -> Finding | None:
    """Returns a finding if a step, or an evaluation, did not fit in the memory of the card."""
    record = evidence.record
    events = [event for event in record.events if event["kind"] in _KINDS]
    if (record.status != "oom" and not events) or memory_creeps.check(evidence) is not None:
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
        return Finding("device_memory_full", message, figures, _less(evidence, micro), lost_frac=1.0)
    first = f"first in step {steps[0]}" if steps else "once"
    how = f"ran out {counted(ooms, 'time')}, {first}" if ooms else f"was so full that torch emptied its cache, {first}"
    change, went = _as_it_ended(events)
    lost = _lost_frac(evidence, steps)
    message = f"Device memory {how}{room}. {went}"
    return Finding("device_memory_full", message, figures | {"lost_frac": lost}, change, lost_frac=lost)


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
    is_held = evidence.value("memory.features") in ("cache", "cache_host") and evidence.value("memory.stages") is None
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
        elif str(event.get("change", "")).startswith("memory."):
            knob, _, value = event["change"].partition("=")
            wanted[knob] = value
    is_restarted = any(event["kind"] == "restart" for event in events)
    if not wanted:
        return (
            (),
            "The run continued from its last checkpoint." if is_restarted else "The run continued without a change.",
        )
    change = tuple(f"{knob}={value}" for knob, value in wanted.items())
    again = "The run continued from its last checkpoint" if is_restarted else "What did not fit was repeated"
    return change, f"{again} in smaller parts, and the run kept these settings."


def _lost_frac(evidence: Evidence, steps: list[int]) -> float:
    """Returns the extra time of repeated steps over the time of all steps."""
    numbers = evidence.all_steps.get("step", np.empty(0))
    took, again = evidence.steps.all_ms, np.isin(numbers, steps)
    if len(took) != len(again) or not again.any() or again.all():
        return 0.0
    return float(np.maximum(took[again] - np.median(took[~again]), 0).sum() / took.sum())
