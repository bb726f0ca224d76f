"""Suggests overrides after a training ran out of memory, by the estimate of its plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

from wellfed.config.schema import OnOom, RunConfig
from wellfed.contract import FEATURE_MODES
from wellfed.plan.budget import MOST_REMEDIES, larger_card, step_shape
from wellfed.plan.memory_candidates import limit_bytes
from wellfed.plan.predict.peak import Footprint, StepShape, fits_within, largest_micro_batch, needed_bytes
from wellfed.plan.run_plan import ModelFacts, RunPlan
from wellfed.units import gib, show_gib

LEAST_FRAC = 0.02
"""Minimum relative saving of a suggested override; smaller ones fit only by chance."""
_TRIED = re.compile(r"[Tt]ried to allocate ([0-9.]+) (bytes|[KMG]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class RanOut:
    """Settings of a training that ran out of memory."""

    micro_batch: int
    features: str | None
    checkpointed: bool
    lacking_bytes: int = 0
    """Bytes of the failed request; 0 = unknown."""

    @classmethod
    def of(cls, plan: RunPlan, events: Sequence[Mapping[str, Any]], message: str) -> Self:
        """Returns the settings from a run's events and from the message that ended it."""
        memory, tried = plan.memory, _TRIED.search(message)
        found = cls(memory.micro_batch, memory.features, memory.checkpoint_activations)
        for event in events:
            knob, _, value = str(event.get("change", "")).partition("=")
            if "micro_batch" in event and event["kind"] == "step_down":
                found = replace(found, micro_batch=event["micro_batch"])
            elif knob == "memory.features":
                found = replace(found, features=value)
            elif knob == "memory.checkpoint_activations":
                found = replace(found, checkpointed=True)
        lacking = 0 if tried is None else int(float(tried[1]) * _UNITS[tried[2]])
        return replace(found, lacking_bytes=lacking)


def ways_that_fit(plan: RunPlan, config: RunConfig, profile: str, model: ModelFacts, ran_out: RanOut) -> list[str]:
    """Returns overrides that would need less memory, each with its predicted need; none without an estimate.

    The estimate was too low for the run. So an override must save at least the bytes that were lacking. No step is
    rehearsed; settings without an estimate are left out.

    Args:
        plan: plan at the start of training.
        profile: the ``gpu=`` option.
    """
    step, budget_gib = step_shape(plan, model), plan.device.memory_gib
    footprint = plan.footprints.get((ran_out.features, ran_out.checkpointed))
    if budget_gib is None or not isinstance(footprint, Footprint):
        return []
    needed = needed_bytes(footprint, ran_out.micro_batch, step)
    limit = needed - max(ran_out.lacking_bytes, int(LEAST_FRAC * needed))
    found = list(_settings(plan, config, model, ran_out, step, limit))
    without = replace(step, batches_ahead=0)
    if step.batches_ahead and fits_within(footprint, ran_out.micro_batch, without, limit):
        less = needed_bytes(footprint, ran_out.micro_batch, without)
        found.append(f"loader.device_prefetch=0 ({show_gib(gib(less))})")
    ways = found[:MOST_REMEDIES]
    is_split = plan.memory.micro_batch > 1 and model.may_split and plan.trainer.strategy != "fsdp"
    if config.memory.on_oom is OnOom.fail and is_split:
        ways.insert(0, "memory.on_oom=retry, which goes on with smaller micro-batches")
    card = larger_card(config, limit_bytes(budget_gib) + max(needed - limit, 1), profile)
    return [*ways, *([f"a larger card ({card})"] if card else [])]


def _settings(
    plan: RunPlan, config: RunConfig, model: ModelFacts, ran_out: RanOut, step: StepShape, limit: int
) -> Iterator[str]:
    """Yields settings that need at most ``limit`` bytes, cheapest first."""
    mode = ran_out.features
    slower = (mode,) if mode is None else FEATURE_MODES[FEATURE_MODES.index(mode) :]
    checkpointed = (True,) if ran_out.checkpointed else (False, True)
    for features, is_checkpointed in product(slower, checkpointed):
        footprint, micro = plan.footprints.get((features, is_checkpointed)), ran_out.micro_batch
        if not isinstance(footprint, Footprint):
            continue
        if model.may_split:
            micro = min(micro, largest_micro_batch(footprint, limit, step))
        if micro < 1 or not fits_within(footprint, micro, step, limit):
            continue
        typed = [f"memory.features={features}"] if features != plan.memory.features else []
        if is_checkpointed and not plan.memory.checkpoint_activations:
            typed.append("memory.checkpoint_activations=true")
        if micro != plan.memory.micro_batch:
            typed.append(f"memory.micro_batch={micro}")
            if config.memory.accumulate is not None:
                typed.append("memory.accumulate=null")  # follows from the micro-batch
        yield f"{' '.join(typed)} ({show_gib(gib(needed_bytes(footprint, micro, step)))})"
