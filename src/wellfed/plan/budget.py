"""Fits the memory knobs into the budget with the predicted peak as the reason; else lists what would fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from wellfed.config.schema import RunConfig
from wellfed.contract import FEATURE_MODES
from wellfed.errors import Fault
from wellfed.observe.hardware.profiles import PROFILES
from wellfed.plan.memory_candidates import (
    PLANNED_FRAC,
    Candidate,
    Estimate,
    SearchResult,
    SearchSpace,
    cheapest,
    limit_bytes,
    remedies,
    show_parts,
)
from wellfed.plan.micro_batch import in_parts
from wellfed.plan.predict.peak import StepShape
from wellfed.plan.run_plan import DataFacts, Decided, MemorySection, ModelFacts, RunPlan, by_rule
from wellfed.ranks import BUCKET_BYTES, largest_share
from wellfed.units import gib, show_gib

MOST_REMEDIES = 3


def within_budget(
    plan: RunPlan,
    config: RunConfig,
    profile: str,
    data: DataFacts,
    model: ModelFacts,
    estimate: Estimate,
    *,
    fits_host: bool,
) -> RunPlan:
    """Returns the plan with the cheapest memory settings that fit. Typed settings are kept.

    Args:
        profile: the ``gpu=`` option.
        fits_host: whether host memory holds the feature table.
    """
    # Stages, if any, decide where features are.
    has_features = data.feature_rows > 0 and not data.features_trainable
    modes = _slower_modes(plan.memory.features, fits_host=fits_host) if has_features else (plan.memory.features,)
    open_modes = modes if config.memory.features is None else (plan.memory.features,)
    space, budget_gib = _search_space(plan, config, model, open_modes), plan.device.memory_gib
    found = cheapest(space, estimate, budget_gib)
    taken = found.candidate
    if taken is None:
        warning = f"The peak memory is not predicted: {str(found.no_estimate).rstrip('.')}."
        return replace(plan, warnings=(*plan.warnings, warning))
    plan = replace(
        plan,
        memory=_decided(plan.memory, config, space, found, taken, budget_gib),
        parts=taken.peak.parts,
        predicted_peak_gib=taken.peak_gib,
        peak_moment=taken.peak.moment,
    )
    if taken.fits or budget_gib is None:
        return plan
    flags = {"may_split": model.may_split, "has_blocks": model.has_blocks}
    changes: dict[str, Candidate] = {}
    for one in remedies(space, estimate, budget_gib, features=modes, **flags):
        changes.setdefault(_overrides(config, space, one), one)
    misfit = _misfit(taken, changes, budget_gib, larger_card(config, taken.reserved_bytes, profile))
    return replace(plan, misfit=misfit, remedies=tuple(changes))


def step_shape(plan: RunPlan, model: ModelFacts) -> StepShape:
    """Returns the work of one device in an optimizer step of this plan."""
    halves = 2 if plan.device.precision == "bf16-true" else 1  # the model itself is in bf16
    return StepShape(
        samples=largest_share(plan.workload.effective_batch_size, plan.trainer.world_size),
        batches_ahead=plan.loader.device_prefetch,
        world_size=plan.trainer.world_size,
        workspaces=plan.device.workspaces,
        room_for_sums=BUCKET_BYTES if plan.memory.on_oom == "retry" else 0,
        is_sharded=plan.trainer.strategy == "fsdp",
        gathered=model.gathered_bytes // halves,
        average=model.average_bytes // halves,
        num_eval=plan.num_validation,
        eval_batch_size=plan.validation_batch_size,
    )


def _slower_modes(mode: str | None, *, fits_host: bool) -> tuple[str | None, ...]:
    """Returns this feature mode and the slower ones that need less device memory; no table that the host can't hold."""
    slower = () if mode is None else FEATURE_MODES[FEATURE_MODES.index(mode) + 1 :]
    return (mode, *(each for each in slower if fits_host or each != "cache_host"))


def _search_space(plan: RunPlan, config: RunConfig, model: ModelFacts, features: tuple[str | None, ...]) -> SearchSpace:
    memory = config.memory
    is_fixed = memory.micro_batch is not None or memory.accumulate is not None or not model.may_split
    asked = memory.checkpoint_activations if model.has_blocks else False
    return SearchSpace(
        features=features,
        checkpointed=(False, True) if asked is None else (asked,),
        micro_batch=plan.memory.micro_batch if is_fixed else None,
        at_most=plan.memory.micro_batch,
        step=step_shape(plan, model),
    )


def _decided(
    by_thumb: MemorySection,
    config: RunConfig,
    space: SearchSpace,
    found: SearchResult,
    taken: Candidate,
    budget_gib: float | None,
) -> MemorySection:
    rule, samples = by_thumb.decided("micro_batch"), space.step.samples
    peak = f"predicted peak {taken.peak_gib:.2f} GiB"
    if budget_gib is not None:
        peak += f" of {budget_gib * PLANNED_FRAC:.2f} ({PLANNED_FRAC:g} of the budget)"
    if taken.micro_batch == rule.value or rule.source == "set":
        micro: Decided[int] = replace(rule, because=f"{rule.because}; {peak}")
    else:
        because = f"the most of {samples} samples a device that fit at a time; {peak}"
        micro = by_rule(taken.micro_batch, because)
    num_micro, sums = in_parts(samples, micro.value)
    decided: dict[str, Decided[object]] = {"micro_batch": micro}
    if num_micro != by_thumb.accumulate:
        decided["accumulate"] = by_rule(num_micro, sums)

    def need(features: str | None, checkpointed: bool) -> str:
        alike = [each for each in found.passed_over if each.features == features]
        least = next((each for each in alike if each.checkpointed == checkpointed), alike[0])
        return f"{_at_a_time(least.micro_batch)} {least.peak_gib:.2f} GiB"

    if config.memory.checkpoint_activations is None and taken.checkpointed:
        decided["checkpoint_activations"] = by_rule(True, f"on: without it {need(taken.features, False)}")
    if taken.features != by_thumb.features:
        faster = space.features[0]
        because = f"{faster} would be faster, and {need(faster, taken.checkpointed)}"
        decided["features"] = by_rule(taken.features, because)
    return by_thumb.but(**decided)


def _misfit(taken: Candidate, changes: Mapping[str, Candidate], budget_gib: float, card: str) -> Fault:
    problem = (
        f"the budget is {show_gib(budget_gib)}, of which {show_gib(budget_gib * PLANNED_FRAC)} are planned with, and "
        f"{_at_a_time(taken.micro_batch)} {show_gib(taken.peak_gib)}: {show_parts(taken)}."
    )
    ways_out = [f"set {change} ({show_gib(one.peak_gib)})" for change, one in list(changes.items())[:MOST_REMEDIES]]
    if card:
        ways_out.append(f"take a larger card ({card})")
    text = "; or ".join(ways_out or ["take a smaller workload.model"])
    return Fault("gpu.memory_gib", problem, f"{text[0].upper()}{text[1:]}.")


def _at_a_time(micro_batch: int) -> str:
    return "one sample at a time needs" if micro_batch == 1 else f"{micro_batch} samples at a time need"


def larger_card(config: RunConfig, reserved_bytes: int, profile: str) -> str:
    """Returns the override for a card that can reserve these bytes; empty if there is none.

    If the budget was typed, the override is a larger budget, not a profile.
    """
    asked, named = config.gpu.memory_gib, PROFILES.get(profile)
    if asked is not None and (named is None or asked != named.budget_gib):
        enough_gib = math.ceil(100 * gib(reserved_bytes) / PLANNED_FRAC + 0.01) / 100
        return f"gpu.memory_gib={enough_gib:g}"
    fitting = (name for name, each in PROFILES.items() if reserved_bytes <= limit_bytes(each.budget_gib))
    return next((f"gpu={name}" for name in fitting), "")


def _overrides(config: RunConfig, space: SearchSpace, candidate: Candidate) -> str:
    """Returns the overrides for this candidate that differ from the configuration."""
    memory, typed = config.memory, []
    num_micro = math.ceil(space.step.samples / candidate.micro_batch)
    if candidate.features != space.features[0]:
        typed.append(f"memory.features={candidate.features}")
    if candidate.checkpointed and not memory.checkpoint_activations:
        typed.append("memory.checkpoint_activations=true")
    if memory.micro_batch is not None and candidate.micro_batch != memory.micro_batch:
        typed.append(f"memory.micro_batch={candidate.micro_batch}")
        if memory.accumulate is not None:
            typed.append("memory.accumulate=null")  # follows from the micro-batch
    elif memory.accumulate is not None and num_micro != memory.accumulate:
        typed.append(f"memory.accumulate={num_micro}")
    return " ".join(typed) or "memory=auto"
