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
from wellfed.errors import Fault
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
    fits: bool

    @property
    def peak_gib(self) -> float:
        """Predicted peak."""
        return gib(self.peak.reserved_bytes)

    @property
    def need(self) -> str:
        """Micro-batch and peak, for messages."""
        return f"{_at_a_time(self.micro_batch)} {show_gib(self.peak_gib)}"


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
    is_typed = asked.micro_batch is not None or asked.accumulate is not None
    has_features = data.feature_rows > 0 and not data.features_trainable
    modes = _slower_modes(memory.features, fits_host=fits_host) if has_features else (memory.features,)
    limit, step = None if budget_gib is None else limit_bytes(budget_gib), step_shape(plan, model)

    def settings(
        modes: Sequence[str | None], checkpointed: Sequence[bool], at_most: int, *, may_split: bool
    ) -> Iterator[Setting | NoEstimate]:
        """Yields settings in the order of their cost, each with the largest micro-batch that fits."""
        for features, is_checkpointed in product(modes, checkpointed):
            footprint = estimate(features, is_checkpointed)
            if isinstance(footprint, NoEstimate):
                yield footprint
                continue
            micro = at_most
            if may_split and limit is not None:
                micro = min(largest_micro_batch(footprint, limit, step), at_most) or 1
            peak = predicted_peak(footprint, micro, step)
            yield Setting(features, is_checkpointed, micro, peak, limit is None or peak.reserved_bytes <= limit)

    both = (False, True) if model.has_blocks else (False,)
    passed = list[Setting]()
    for found in settings(
        modes if asked.features is None else modes[:1],
        both if asked.checkpoint_activations is None else (memory.checkpoint_activations,),
        memory.micro_batch,
        may_split=model.may_split and not is_typed,
    ):
        if isinstance(found, NoEstimate):
            warning = f"The peak memory is not predicted: {found.reason.rstrip('.')}."
            return replace(plan, warnings=(*plan.warnings, warning))
        taken = found
        if taken.fits:
            break
        passed.append(taken)
    else:
        taken = min(passed, key=lambda each: each.peak.reserved_bytes)
    plan = replace(
        plan,
        memory=_decided(memory, config, step, taken, passed, budget_gib),
        parts=taken.peak.parts,
        predicted_peak_gib=taken.peak_gib,
        peak_moment=taken.peak.moment,
    )
    if taken.fits or budget_gib is None:
        return plan
    remedies: dict[str, Setting] = {}  # also by changes of what was typed
    at_most = step.samples if model.may_split else memory.micro_batch
    for one in settings(modes, both, at_most, may_split=model.may_split):
        if isinstance(one, Setting) and one.fits:
            remedies.setdefault(_overrides(config, memory, step, one), one)
    ways_out = [f"set {change} ({show_gib(one.peak_gib)})" for change, one in list(remedies.items())[:MOST_REMEDIES]]
    if card := larger_card(config, taken.peak.reserved_bytes, profile):
        ways_out.append(f"take a larger card ({card})")
    sizes = {**taken.peak.parts, "cuBLAS's workspaces": taken.peak.workspaces}
    return replace(plan, misfit=misfit(budget_gib, taken.need, sizes, ways_out), remedies=tuple(remedies))


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
    halves = 2 if plan.device.precision == "bf16-true" else 1  # the model itself is in bf16
    return StepShape(
        samples=largest_share(plan.workload.effective_batch_size, plan.trainer.world_size),
        batches_ahead=plan.loader.device_prefetch,
        world_size=plan.trainer.world_size,
        workspaces=plan.device.workspaces,
        is_sharded=plan.trainer.strategy == "fsdp",
        gathered=model.gathered_bytes // halves,
        average=model.average_bytes // halves,
    )


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


def _slower_modes(mode: str | None, *, fits_host: bool) -> tuple[str | None, ...]:
    """Returns this feature mode and the slower ones that need less device memory; no table that the host can't hold."""
    slower = () if mode is None else FEATURE_MODES[FEATURE_MODES.index(mode) + 1 :]
    return (mode, *(each for each in slower if fits_host or each != "cache_host"))


def _decided(
    by_thumb: MemorySection,
    config: RunConfig,
    step: StepShape,
    taken: Setting,
    passed: Sequence[Setting],
    budget_gib: float | None,
) -> MemorySection:
    rule = by_thumb.decided("micro_batch")
    peak = f"predicted peak {taken.peak_gib:.2f} GiB"
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


def _overrides(config: RunConfig, planned: MemorySection, step: StepShape, setting: Setting) -> str:
    """Returns the overrides for this setting that differ from the configuration."""
    memory, typed = config.memory, []
    num_micro = math.ceil(step.samples / setting.micro_batch)
    if setting.features != planned.features:
        typed.append(f"memory.features={setting.features}")
    if setting.checkpointed and not memory.checkpoint_activations:
        typed.append("memory.checkpoint_activations=true")
    if memory.micro_batch is not None and setting.micro_batch != memory.micro_batch:
        typed.append(f"memory.micro_batch={setting.micro_batch}")
        if memory.accumulate is not None:
            typed.append("memory.accumulate=null")  # follows from the micro-batch
    elif memory.accumulate is not None and num_micro != memory.accumulate:
        typed.append(f"memory.accumulate={num_micro}")
    return " ".join(typed) or "memory=auto"


def _at_a_time(micro_batch: int) -> str:
    return "one sample at a time needs" if micro_batch == 1 else f"{micro_batch} samples at a time need"
