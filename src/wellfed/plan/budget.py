"""Fits the memory knobs into the budget with the predicted peak as the reason; else lists what would fit.

Order of cost: a whole step; smaller micro-batches, which use kernels less well; checkpointing, about a third more
compute; a feature table in host memory, with a copy per batch; ``dynamic``, which runs the encoder each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from wellfed.config.schema import RunConfig
from wellfed.contract import FEATURE_MODES
from wellfed.errors import DoesNotFit, Fault
from wellfed.observe.hardware.profiles import PROFILES
from wellfed.plan.micro_batch import PLANNED_FRAC, in_parts, limit_bytes
from wellfed.plan.predict.peak import Footprint, NoEstimate, Prediction, StepShape, largest_micro_batch, predicted_peak
from wellfed.plan.run_plan import DataFacts, Decided, MemorySection, ModelFacts, RunPlan, by_rule
from wellfed.ranks import largest_share
from wellfed.units import gib, show_bytes, show_gib

Estimate = Callable[[str | None, bool], Footprint | NoEstimate]
"""Returns the footprint for a feature mode (None = no features) with or without activation checkpointing."""
MOST_REMEDIES = 3
MOST_PARTS = 4
"""Parts of a peak that a message lists by name."""


@dataclass(frozen=True)
class Setting:
    """A way to spend memory, with its predicted peak on each device."""

    features: str | None
    checkpointed: bool
    micro_batch: int
    peak: Prediction

    @property
    def need(self) -> str:
        """Micro-batch and peak, for messages."""
        size = self.micro_batch
        samples = "one sample at a time needs" if size == 1 else f"{size} samples at a time need"
        return f"{samples} {show_gib(gib(self.peak.tensor_bytes))}"


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
    memory, asked, budget_gib = plan.memory, config.memory, plan.device.memory_gib
    step, limit = step_shape(plan, model), None if budget_gib is None else limit_bytes(budget_gib)
    planned = estimate(memory.features, memory.checkpoint_activations)
    if isinstance(planned, NoEstimate):
        warning = f"The peak memory is not predicted: {planned.reason.rstrip('.')}."
        return replace(plan, warnings=(*plan.warnings, warning))
    # Slower modes need less device memory, unless the host can't hold the table.
    slower = FEATURE_MODES[FEATURE_MODES.index(memory.features) + 1 :] if memory.features and data.feature_rows else ()
    modes = (memory.features, *(each for each in slower if fits_host or each != "cache_host"))
    both = (False, True) if model.has_blocks else (False,)

    def settings(
        modes: Sequence[str | None], checkpointed: Sequence[bool], at_most: int, *, may_split: bool
    ) -> Iterator[Setting]:
        """Yields settings in the order of their cost, each with the largest micro-batch that fits."""
        for features, is_checkpointed in product(modes, checkpointed):
            footprint = estimate(features, is_checkpointed)
            if isinstance(footprint, Footprint):
                micro = at_most
                if may_split and limit is not None:
                    micro = min(largest_micro_batch(footprint, limit, step), at_most) or 1
                yield Setting(features, is_checkpointed, micro, predicted_peak(footprint, micro, step))

    def fits(setting: Setting) -> bool:
        return limit is None or setting.peak.tensor_bytes <= limit

    allowed = settings(
        modes if asked.features is None else modes[:1],
        both if asked.checkpoint_activations is None else (memory.checkpoint_activations,),
        memory.micro_batch,
        may_split=model.may_split and asked.micro_batch is None and asked.accumulate is None,
    )
    passed = list[Setting]()
    for taken in allowed:
        if fits(taken):
            break
        passed.append(taken)
    else:
        taken = min(passed, key=lambda each: each.peak.tensor_bytes)
    plan = replace(
        plan,
        memory=_decided(memory, config, step, taken, passed, budget_gib),
        parts=taken.peak.parts,
        predicted_peak_gib=gib(taken.peak.tensor_bytes),
        peak_moment=taken.peak.moment,
    )
    if budget_gib is None or fits(taken):
        return plan
    remedies: dict[str, Setting] = {}  # also by changes of what was typed
    at_most = step.samples if model.may_split else memory.micro_batch
    for one in filter(fits, settings(modes, both, at_most, may_split=model.may_split)):
        remedies.setdefault(_overrides(config, memory, one), one)
    ways_out = [
        f"set {change} ({show_gib(gib(one.peak.tensor_bytes))})"
        for change, one in list(remedies.items())[:MOST_REMEDIES]
    ]
    if card := larger_card(config, taken.peak.tensor_bytes, profile):
        ways_out.append(f"take a larger card ({card})")
    return replace(plan, misfit=misfit(budget_gib, taken.need, taken.peak.parts, ways_out), remedies=tuple(remedies))


def by_known_bytes(plan: RunPlan, data: DataFacts, model: ModelFacts, *, fits_host: bool) -> RunPlan:
    """Returns the plan with the bytes that are known without an estimate: all but activations and inputs.

    Raises:
        DoesNotFit: they alone exceed a card.
    """
    halves = _halves(plan)
    parts = {
        "parameters": model.parameter_bytes // halves,
        "gradients": model.trainable_bytes // halves,
        "optimizer state": model.optimizer_state_bytes // halves,
        "feature table": data.feature_bytes if plan.memory.features == "cache" else 0,
    }
    if model.average_bytes:
        parts["weight average"] = model.average_bytes // halves
    needed, budget_gib = sum(parts.values()), plan.device.memory_gib
    is_known = plan.on_gpu and plan.trainer.strategy != "fsdp" and budget_gib is not None
    if is_known and budget_gib is not None and gib(needed) > budget_gib:
        ways_out = ["take a larger card", "a smaller workload.model"]
        if gib(needed - parts["feature table"]) <= budget_gib:
            ways_out = [f"set memory.features={'cache_host' if fits_host else 'dynamic'}"]
        need = f"before any activation there is need of {show_bytes(needed)}"
        raise DoesNotFit([misfit(budget_gib, need, parts, ways_out)])
    return replace(plan, parts=parts)


def misfit(budget_gib: float, need: str, parts: Mapping[str, int], ways_out: Sequence[str]) -> Fault:
    """Returns the fault of a plan that exceeds its budget.

    Args:
        need: what needs how much, such as "one sample at a time needs 9.0 GiB".
        parts: bytes by purpose.
        ways_out: each as a clause, such as "set memory.accumulate=4".
    """
    sizes = sorted(parts.items(), key=lambda part: -part[1])
    sizes[MOST_PARTS:] = [("other parts", sum(size for _, size in sizes[MOST_PARTS:]))]
    listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in sizes if size)
    planned = f"{show_gib(budget_gib)}, of which {show_gib(budget_gib * PLANNED_FRAC)} are planned with"
    text = "; or ".join(ways_out or ["take a smaller workload.model"])
    return Fault("gpu.memory_gib", f"the budget is {planned}, and {need}: {listed}.", f"{text[0].upper()}{text[1:]}.")


def step_shape(plan: RunPlan, model: ModelFacts) -> StepShape:
    """Returns the work of one device in an optimizer step of this plan."""
    return StepShape(
        largest_share(plan.workload.effective_batch_size, plan.trainer.world_size),
        batches_ahead=plan.loader.device_prefetch,
        world_size=plan.trainer.world_size,
        average=model.average_bytes // _halves(plan),
    )


def larger_card(config: RunConfig, needed_bytes: int, profile: str) -> str:
    """Returns the override for a card that holds these bytes; empty if there is none.

    If the budget was typed, the override is a larger budget, not a profile.
    """
    asked, named = config.gpu.memory_gib, PROFILES.get(profile)
    if asked is not None and (named is None or asked != named.budget_gib):
        enough_gib = math.ceil(100 * gib(needed_bytes) / PLANNED_FRAC + 0.01) / 100
        return f"gpu.memory_gib={enough_gib:g}"
    fitting = (name for name, each in PROFILES.items() if needed_bytes <= limit_bytes(each.budget_gib))
    return next((f"gpu={name}" for name in fitting), "")


def _halves(plan: RunPlan) -> int:
    """Returns 2 if the model itself is in bf16, else 1."""
    return 2 if plan.device.precision == "bf16-true" else 1


def _decided(
    by_thumb: MemorySection,
    config: RunConfig,
    step: StepShape,
    taken: Setting,
    passed: Sequence[Setting],
    budget_gib: float | None,
) -> MemorySection:
    rule = by_thumb.decided("micro_batch")
    peak = f"predicted peak {gib(taken.peak.tensor_bytes):.2f} GiB"
    if budget_gib is not None:
        peak += f" of {budget_gib * PLANNED_FRAC:.2f} ({PLANNED_FRAC:g} of the budget)"
    if taken.micro_batch == rule.value or rule.source == "set":
        micro: Decided[int] = replace(rule, because=f"{rule.because}; {peak}")
    else:
        because = f"the most of {step.samples} samples a device that fit at a time; {peak}"
        micro = by_rule(taken.micro_batch, because)
    num_micro, sums = in_parts(step.samples, micro.value)
    decided: dict[str, Decided[object]] = {"micro_batch": micro}
    if num_micro != by_thumb.accumulate:
        decided["accumulate"] = by_rule(num_micro, sums)
    if config.memory.checkpoint_activations is None and taken.checkpointed:
        without = next((each for each in passed if each.features == taken.features), passed[0])
        decided["checkpoint_activations"] = by_rule(True, f"on: without it {without.need}")
    if taken.features != by_thumb.features:
        faster = passed[0]
        decided["features"] = by_rule(taken.features, f"{faster.features} would be faster, and {faster.need}")
    return by_thumb.but(**decided)


def _overrides(config: RunConfig, planned: MemorySection, setting: Setting) -> str:
    """Returns the overrides for this setting that differ from the plan; an untyped micro-batch follows by itself."""
    memory, typed = config.memory, []
    if setting.features != planned.features:
        typed.append(f"memory.features={setting.features}")
    if setting.checkpointed and not memory.checkpoint_activations:
        typed.append("memory.checkpoint_activations=true")
    if (memory.micro_batch or memory.accumulate) and setting.micro_batch != planned.micro_batch:
        typed.append(f"memory.micro_batch={setting.micro_batch}")
        if memory.accumulate is not None:
            typed.append("memory.accumulate=null")  # follows from the micro-batch
    return " ".join(typed) or "memory=auto"
