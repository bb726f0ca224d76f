"""Chooses the micro-batch of a plan by real steps: one that fits in memory, or one that keeps the best rate.

Real steps are probes before training, or those of earlier runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from wellfed.plan.memory_candidates import limit_bytes
from wellfed.plan.predict.footprint import Footprint, StepShape, fits_within, largest_micro_batch, predicted_peak
from wellfed.plan.run_plan import TRY_AGAIN, Decided, RunPlan
from wellfed.train.memory.remembered import MICRO_BATCH, Lowered
from wellfed.units import gib, show_bytes

MOST_PROBES = 6


def with_probes(
    plan: RunPlan,
    footprint: Footprint,
    step: StepShape,
    probe: Callable[[int], int | None],
    room: Callable[[], int | None],
    *,
    may_split: bool = True,
) -> RunPlan:
    """The plan with a micro-batch of which a real step was measured; never a larger one than planned.

    A probe is a step of the micro-batch alone. What it takes beyond its own prediction is added to the prediction of
    the run's whole step, in which more inputs and gradients are there.

    Args:
        footprint: what ``plan``, which has a budget, was made with; so is ``step``.
        probe: bytes that the allocator reserved at the peak; None where they ran out.
        may_split: a smaller micro-batch may be taken; else a step that takes too much is warned of.
        room: what this process can have of the card, asked when CUDA's context is there; None where nothing tells.
    """
    budget_gib = plan.device.memory_gib
    assert budget_gib is not None
    micro, said, fits = plan.memory.micro_batch, list[str](), False
    for _ in range(MOST_PROBES):
        measured = probe(micro)
        if measured is None:
            said.append(f"{micro} at a time ran out of memory")
            smaller = micro // 2
        else:
            limit, left = _limit(budget_gib, room())
            predicted = predicted_peak(footprint, micro, StepShape(micro, workspaces=step.workspaces)).reserved_bytes
            took = f"a step of {micro} alone took {show_bytes(measured)}"
            said.append(f"{took} where {show_bytes(predicted)} were predicted{left}")
            beyond = max(0, measured - predicted)
            fits = fits_within(footprint, micro, step, limit - beyond)
            if fits:
                break
            # If all sizes need as many times more; what part of it does not grow with them, the next probe shows.
            smaller = min(micro - 1, largest_micro_batch(footprint, limit * predicted // (predicted + beyond), step))
        if micro == 1 or not may_split:
            break
        micro = max(1, smaller)
    told, before = "; ".join(said), plan.memory.decided("micro_batch")
    if not fits:
        warning = f"Memory may run out at memory.micro_batch={micro}: {told}. A smaller workload.model needs less."
        plan = replace(plan, warnings=(*plan.warnings, warning))
    if micro == before.value:
        as_planned = Decided(micro, f"{before.because}; {told}", "measured")
        return replace(plan, memory=plan.memory.but(micro_batch=as_planned))
    smaller_one = Decided(micro, f"{before.value} were planned; {told}", "measured")
    return resized(plan, smaller_one, step.samples, footprint, step)


def at_plateau(
    plan: RunPlan,
    frac: float,
    rate: Callable[[int], float | None],
    *,
    samples: int,
    footprint: Footprint | None = None,
    step: StepShape | None = None,
) -> RunPlan:
    """The plan with the smallest micro-batch that keeps a fraction of the best rate, of those tried: halves of a step.

    Args:
        rate: samples/s of real steps; 0 where memory runs out, None to try no more.
        samples: of one device in a step; no larger micro-batch is tried, nor one above what the plan remembers.
        footprint: for the peak of a plan with a budget, with ``step``; larger sizes than it predicts to fit are left.
    """
    size = samples
    if footprint is not None and step is not None and plan.device.memory_gib is not None:
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
    because = f"the smallest that keeps {frac:g} of the best rate: {rates[micro]:,.0f} samples/s"
    if micro != best:
        because += f", and {rates[best]:,.0f} at {best}"
    because += larger
    return resized(plan, Decided(micro, because, "measured"), samples, footprint, step)


def as_remembered(
    plan: RunPlan, remembered: Mapping[str, Lowered], samples: int, footprint: Footprint | None, step: StepShape | None
) -> RunPlan:
    """The plan with what earlier runs of it had to lower; a micro-batch that was set stays, and so does a smaller one.

    Args:
        remembered: by knob, of what the configuration leaves open.
        samples: of one device in a step.
        footprint: what ``plan`` was made with, where it has an estimate; so is ``step``.
    """
    plan = replace(plan, remembered=dict(remembered))
    lowered, planned = remembered.get(MICRO_BATCH), plan.memory.decided("micro_batch")
    if lowered is None or planned.source == "set" or lowered.value >= planned.value:
        return plan
    was = "was planned" if plan.predicted_peak_gib is None else "was predicted to fit"
    ran_out = lowered.when if lowered.before == planned.value else f"{lowered.before} {lowered.when}"
    because = f"{planned.value} {was}, and {ran_out}; {TRY_AGAIN}"
    return resized(plan, Decided(int(lowered.value), because, "measured"), samples, footprint, step)


def resized(
    plan: RunPlan, micro: Decided[int], samples: int, footprint: Footprint | None, step: StepShape | None
) -> RunPlan:
    """The plan with another micro-batch, and the peak that is predicted for it."""
    sums = f"{samples} samples a device in micro-batches of {micro.value}"
    accumulate = Decided(math.ceil(samples / micro.value), sums, "measured")
    plan = replace(plan, memory=plan.memory.but(micro_batch=micro, accumulate=accumulate))
    if footprint is None or step is None or plan.device.memory_gib is None:
        return plan
    peak = predicted_peak(footprint, micro.value, step)
    return replace(
        plan,
        parts=peak.parts,
        predicted_peak_gib=gib(min(peak.reserved_bytes, limit_bytes(plan.device.memory_gib))),
        peak_moment=peak.moment,
    )


def _limit(budget_gib: float, room_bytes: int | None) -> tuple[int, str]:
    """Bytes to plan with, and what to say where the card has less than the budget."""
    if room_bytes is None or gib(room_bytes) >= budget_gib:
        return limit_bytes(budget_gib), ""
    return limit_bytes(gib(room_bytes)), f", and beside CUDA's context the card has {show_bytes(room_bytes)}"
