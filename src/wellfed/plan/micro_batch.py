"""Decides the micro-batch: the samples of an optimizer step that a device computes at a time.

Each of these may change the decision of the one before it, so the last that applies wins.

1. `rule_of_thumb`: the typed value (``memory.micro_batch``, ``memory.accumulate``), else the device's whole share.
2. `budget.within_budget`: the largest size whose predicted peak fits the budget.
3. `as_remembered`: a smaller size that an earlier run of this plan had to step down to.
4. `at_plateau`: only with ``memory.plateau_frac``; the smallest size that keeps this share of the best measured rate.
5. `with_probes`: on one GPU, a real step of the size from 2 or 4; a smaller size if that needs too much memory.
6. `train.memory.step_down`: a training step that runs out of memory halves the size, which the next run recalls in 3.

A typed size can only change in 6. A size from 3 is not measured again. `steps_to_run` decides about 4 and 5.
Pure: the steps themselves run in `run.micro_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from wellfed.config.schema import OnOom, RunConfig, Strategy
from wellfed.errors import ConfigError
from wellfed.plan.memory_candidates import limit_bytes
from wellfed.plan.predict.peak import Footprint, StepShape, fits_within, largest_micro_batch, predicted_peak
from wellfed.plan.run_plan import TRY_AGAIN, Decided, ModelFacts, RunPlan, by_rule
from wellfed.ranks import largest_share
from wellfed.train.memory.remembered_sizes import MICRO_BATCH, Lowered
from wellfed.units import gib, show_bytes, show_count

MOST_PROBES = 6


def rule_of_thumb(config: RunConfig, model: ModelFacts) -> Decided[int]:
    """Returns the typed size, else the device's whole share of a step, or a quarter of it for a plateau."""
    memory, world = config.memory, config.trainer.world_size
    per_device = largest_share(config.workload.samples_per_step, world)
    share = f"{config.workload.samples_per_step} samples a step" + (f" over {world} devices" if world > 1 else "")
    if memory.micro_batch is not None:
        return Decided(memory.micro_batch, f"memory.micro_batch={memory.micro_batch}", "set")
    if memory.accumulate is not None:
        size = math.ceil(per_device / memory.accumulate)
        return Decided(size, f"{share} in memory.accumulate={memory.accumulate} parts", "set")
    if memory.plateau_frac is not None and not model.has_batch_norm:
        return by_rule(max(1, per_device // 4), f"a quarter of {share}: the rate at each size was not measured")
    may_split = memory.on_oom is OnOom.retry and config.trainer.strategy is not Strategy.fsdp
    rest = "unsplit until memory runs out" if may_split and not model.has_batch_norm else "unsplit"
    return by_rule(per_device, f"{share}, {rest}")


def in_parts(samples: int, micro_batch: int) -> tuple[int, str]:
    """Returns the number of micro-batches of a device's samples, and the reason for ``memory.accumulate``."""
    return math.ceil(samples / micro_batch), f"{samples} samples a device in micro-batches of {micro_batch}"


def as_remembered(
    plan: RunPlan, remembered: Mapping[str, Lowered], step: StepShape, footprint: Footprint | None
) -> RunPlan:
    """Returns the plan with values that earlier runs had to lower. Typed and smaller sizes are kept.

    Args:
        remembered: lowered values by knob, for knobs that were not typed.
        footprint: footprint that ``plan`` is based on, if any.
    """
    plan = replace(plan, remembered=dict(remembered))
    lowered, planned = remembered.get(MICRO_BATCH), plan.memory.decided("micro_batch")
    if lowered is None or planned.source == "set" or lowered.value >= planned.value:
        return plan
    was = "was planned" if plan.predicted_peak_gib is None else "was predicted to fit"
    ran_out = lowered.when if lowered.before == planned.value else f"{lowered.before} {lowered.when}"
    because = f"{planned.value} {was}, and {ran_out}; {TRY_AGAIN}"
    return _resized(plan, Decided(int(lowered.value), because, "measured"), step, footprint)


@dataclass(frozen=True)
class StepsToRun:
    """Reasons to run real steps before training; falsy without one."""

    plateau: bool
    """Whether to measure the rate of several sizes."""
    memory: bool
    """Whether to measure the memory of the planned size."""

    def __bool__(self) -> bool:
        return self.plateau or self.memory


def steps_to_run(plan: RunPlan, plateau_frac: float | None, model: ModelFacts) -> StepsToRun:
    """Returns what to measure by real steps; nothing unless the micro-batch is a prediction."""
    is_predicted = plan.memory.reasons["micro_batch"].source == "predicted"
    return StepsToRun(
        plateau=is_predicted and plateau_frac is not None and model.may_split,
        memory=is_predicted and plan.on_gpu and plan.predicted_peak_gib is not None,
    )


def why_untried(plan: RunPlan, model: ModelFacts) -> str:
    """Returns why no step can run before training; empty if one can."""
    if model.is_lightning_module:
        return "a LightningModule runs its own step"
    if plan.trainer.world_size > 1:
        return "each rank would measure for itself, and all must take the same size"
    if plan.device.compile != "none":
        compiled = f"gpu.compile={plan.device.compile} would compile twice"
        return f"{compiled}; what it keeps for its graphs is not predicted"
    return ""


def at_plateau(
    plan: RunPlan, frac: float, rate: Callable[[int], float | None], step: StepShape, footprint: Footprint | None
) -> RunPlan:
    """Returns the plan with the smallest tried micro-batch that keeps ``frac`` of the best rate.

    The sizes tried are the device's whole share of a step, its half, and so on. Sizes that are recalled or predicted as
    too large are skipped.

    Args:
        rate: returns samples/s of real steps; 0 if memory runs out, None to stop trying.
        footprint: for the predicted peaks of a plan with a budget.
    """
    size = step.samples
    if footprint is not None and plan.device.memory_gib is not None:
        size = max(1, largest_micro_batch(footprint, limit_bytes(plan.device.memory_gib), step))
    lowered = plan.remembered.get(MICRO_BATCH)
    if lowered is not None and lowered.value < size:
        size = lowered.value
        larger = f"; {lowered.before} {lowered.when}, and no more than {size} was tried: {TRY_AGAIN}"
    else:
        larger = ""
    rates: dict[int, float] = {}
    while size not in rates and (found := rate(size)) is not None:
        rates[size] = found
        if found < frac * max(rates.values()):
            break
        size = max(1, size // 2)
    if not any(rates.values()):
        return plan
    best = max(rates, key=lambda each: rates[each])
    micro = min(each for each in rates if rates[each] >= frac * rates[best])
    because = f"the smallest that keeps {frac:g} of the best rate: {show_count(rates[micro])} samples/s"
    if micro != best:
        because += f", and {show_count(rates[best])} at {best}"
    return _resized(plan, Decided(micro, f"{because}{larger}", "measured"), step, footprint)


def with_probes(
    plan: RunPlan,
    probe: Callable[[int], int | None],
    available: Callable[[], int | None],
    step: StepShape,
    footprint: Footprint,
    *,
    may_split: bool = True,
) -> RunPlan:
    """Returns the plan with a micro-batch that a real step has measured. It is never larger than planned.

    A probe is a step of a single micro-batch. A step of the run has more inputs and gradients. So its prediction is
    raised by the excess of the probe over its own prediction.

    Args:
        probe: returns the bytes that the allocator reserved at the peak; None if memory ran out.
        available: returns the bytes available to this process once CUDA's context exists; None if unknown.
        footprint: footprint that ``plan``, which has a budget, is based on.
        may_split: whether the micro-batch may be reduced; if not, an excessive step gives a warning.
    """
    budget_gib = plan.device.memory_gib
    assert budget_gib is not None
    micro, found, fits = plan.memory.micro_batch, list[str](), False
    for _ in range(MOST_PROBES):
        measured = probe(micro)
        if measured is None:
            found.append(f"{micro} at a time ran out of memory")
            smaller = micro // 2
        else:
            limit, left = _limit(budget_gib, available())
            predicted = predicted_peak(footprint, micro, StepShape(micro, workspaces=step.workspaces)).reserved_bytes
            took = f"a step of {micro} alone took {show_bytes(measured)}"
            found.append(f"{took} where {show_bytes(predicted)} were predicted{left}")
            beyond = max(0, measured - predicted)
            fits = fits_within(footprint, micro, step, limit - beyond)
            if fits:
                break
            # Assumes the same ratio for all sizes. The next probe shows the part that does not grow with the size.
            smaller = min(micro - 1, largest_micro_batch(footprint, limit * predicted // (predicted + beyond), step))
        if micro == 1 or not may_split:
            break
        micro = max(1, smaller)
    shown, before = "; ".join(found), plan.memory.decided("micro_batch")
    if not fits:
        warning = f"Memory may run out at memory.micro_batch={micro}: {shown}. A smaller workload.model needs less."
        plan = replace(plan, warnings=(*plan.warnings, warning))
    if micro == before.value:
        as_planned = Decided(micro, f"{before.because}; {shown}", "measured")
        return replace(plan, memory=plan.memory.but(micro_batch=as_planned))
    return _resized(plan, Decided(micro, f"{before.value} were planned; {shown}", "measured"), step, footprint)


def with_way_down(plan: RunPlan, steps: Sequence[int] | None) -> RunPlan:
    """Returns the plan, whose micro-batch is final now, with the unused ``memory.micro_batch_steps``.

    Raises:
        ConfigError: none of them is smaller than the micro-batch.
    """
    micro = plan.memory.micro_batch
    unused = [size for size in steps or () if size >= micro]
    if not unused or plan.memory.on_oom == "fail":
        return plan
    listed = ", ".join(map(str, unused))
    if len(unused) == len(steps or ()) and micro > 1:
        raise ConfigError.of(
            "memory.micro_batch_steps",
            f"[{listed}] has no size below the micro-batch of {micro}, from which it is to lead down.",
            f"Set memory.micro_batch_steps=[{micro // 2}], or null, which halves.",
        )
    verb = "is" if len(unused) == 1 else "are"
    return because_too(plan, f"; of memory.micro_batch_steps {listed} {verb} not below it")


def because_too(plan: RunPlan, more: str) -> RunPlan:
    """Returns the plan with ``more`` added to the micro-batch's reason."""
    micro = plan.memory.decided("micro_batch")
    return replace(plan, memory=plan.memory.but(micro_batch=replace(micro, because=f"{micro.because}{more}")))


def _resized(plan: RunPlan, micro: Decided[int], step: StepShape, footprint: Footprint | None) -> RunPlan:
    accumulate = Decided(*in_parts(step.samples, micro.value), "measured")
    plan = replace(plan, memory=plan.memory.but(micro_batch=micro, accumulate=accumulate))
    if footprint is None or plan.device.memory_gib is None:
        return plan
    peak = predicted_peak(footprint, micro.value, step)
    return replace(
        plan,
        parts=peak.parts,
        predicted_peak_gib=gib(min(peak.reserved_bytes, limit_bytes(plan.device.memory_gib))),
        peak_moment=peak.moment,
    )


def _limit(budget_gib: float, available_bytes: int | None) -> tuple[int, str]:
    """Returns the bytes to plan with, and a remark if the card has less than the budget."""
    if available_bytes is None or gib(available_bytes) >= budget_gib:
        return limit_bytes(budget_gib), ""
    return limit_bytes(gib(available_bytes)), f", and beside CUDA's context the card has {show_bytes(available_bytes)}"
