"""Decides the micro-batch: the samples of an optimizer step that a device computes at a time.

Each of these may change the decision of the one before it, so the last that applies wins.

1. `rule_of_thumb`: the typed value (``memory.micro_batch``, ``memory.accumulate``), else the device's whole share.
2. `budget.within_budget`: the largest size whose predicted peak fits the budget.
3. `with_probes`: on one GPU, a real step of the size from 2; a smaller size if that needs too much memory.
4. `train.memory.step_down`: a training step that runs out of memory halves the size.

A typed size can only change in 4. Pure: the steps themselves run in `run.micro_batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from wellfed.config.schema import OnOom, RunConfig, Strategy
from wellfed.plan.predict.peak import Footprint, StepShape, largest_micro_batch, predicted_peak
from wellfed.plan.run_plan import Decided, ModelFacts, RunPlan, by_rule
from wellfed.ranks import largest_share
from wellfed.units import gib, show_bytes

MOST_PROBES = 6
PLANNED_FRAC = 0.9
"""Maximum share of the budget for a predicted peak. The rest covers what the allocator reserves beyond the tensors,
workspaces of kernels, and errors of the prediction, which is within 10 %."""


def limit_bytes(budget_gib: float) -> int:
    """Returns the maximum bytes of a planned peak."""
    return int(PLANNED_FRAC * budget_gib * 2**30)


def rule_of_thumb(config: RunConfig, model: ModelFacts) -> Decided[int]:
    """Returns the typed size, else the device's whole share of a step."""
    memory, world = config.memory, config.trainer.world_size
    per_device = largest_share(config.workload.samples_per_step, world)
    share = f"{config.workload.samples_per_step} samples a step" + (f" over {world} devices" if world > 1 else "")
    if memory.micro_batch is not None:
        return Decided(memory.micro_batch, f"memory.micro_batch={memory.micro_batch}", "set")
    if memory.accumulate is not None:
        size = math.ceil(per_device / memory.accumulate)
        return Decided(size, f"{share} in memory.accumulate={memory.accumulate} parts", "set")
    may_split = memory.on_oom is OnOom.retry and config.trainer.strategy is not Strategy.fsdp
    rest = "unsplit until memory runs out" if may_split and not model.has_batch_norm else "unsplit"
    return by_rule(per_device, f"{share}, {rest}")


def in_parts(samples: int, micro_batch: int) -> tuple[int, str]:
    """Returns the number of micro-batches of a device's samples, and the reason for ``memory.accumulate``."""
    return math.ceil(samples / micro_batch), f"{samples} samples a device in micro-batches of {micro_batch}"


def needs_probe(plan: RunPlan) -> bool:
    """Returns whether a real step is to measure the memory of the micro-batch, which is only predicted so far."""
    is_predicted = plan.memory.reasons["micro_batch"].source == "predicted"
    return is_predicted and plan.on_gpu and plan.predicted_peak_gib is not None


def why_untried(plan: RunPlan, model: ModelFacts) -> str:
    """Returns why no step can run before training; empty if one can."""
    if model.whole_steps:
        return "a LightningModule runs its own step"
    if plan.trainer.world_size > 1:
        return "each rank would measure for itself, and all must take the same size"
    if plan.device.compile != "none":
        compiled = f"gpu.compile={plan.device.compile} would compile twice"
        return f"{compiled}; what it keeps for its graphs is not predicted"
    return ""


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
    before, found, fits = plan.memory.decided("micro_batch"), list[str](), False
    micro = smaller = before.value
    while not fits and len(found) < MOST_PROBES and smaller >= 1 and (may_split or not found):
        micro = smaller
        measured = probe(micro)
        if measured is None:
            found.append(f"{micro} at a time ran out of memory")
            smaller = micro // 2
            continue
        predicted = predicted_peak(footprint, micro, StepShape(micro)).tensor_bytes
        took = f"a step of {micro} alone took {show_bytes(measured)} where {show_bytes(predicted)} were predicted"
        limit, room = limit_bytes(budget_gib), available()
        if room is not None and gib(room) < budget_gib:
            limit, took = limit_bytes(gib(room)), f"{took}, and beside CUDA's context the card has {show_bytes(room)}"
        found.append(took)
        beyond = max(0, measured - predicted)
        fits = predicted_peak(footprint, micro, step).tensor_bytes + beyond <= limit
        # Assumes the same ratio for all sizes. The next probe shows the part that does not grow with the size.
        largest = largest_micro_batch(footprint, limit * predicted // (predicted + beyond), step)
        smaller = min(micro - 1, max(1, largest))
    shown = "; ".join(found)
    if not fits:
        warning = f"Memory may run out at memory.micro_batch={micro}: {shown}. A smaller workload.model needs less."
        plan = replace(plan, warnings=(*plan.warnings, warning))
    if micro == before.value:
        as_planned = Decided(micro, f"{before.because}; {shown}", "measured")
        return replace(plan, memory=plan.memory.but(micro_batch=as_planned))
    resized = Decided(micro, f"{before.value} were planned; {shown}", "measured")
    accumulate = Decided(*in_parts(step.samples, micro), "measured")
    peak = predicted_peak(footprint, micro, step)
    return replace(
        plan,
        memory=plan.memory.but(micro_batch=resized, accumulate=accumulate),
        parts=peak.parts,
        predicted_peak_gib=gib(min(peak.tensor_bytes, limit_bytes(budget_gib))),
        peak_moment=peak.moment,
    )


def because_too(plan: RunPlan, more: str) -> RunPlan:
    """Returns the plan with ``more`` added to the micro-batch's reason."""
    micro = plan.memory.decided("micro_batch")
    return replace(plan, memory=plan.memory.but(micro_batch=replace(micro, because=f"{micro.because}{more}")))
