"""A plan put to the test by real steps before training: the micro-batch goes down until what was measured fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from wellfed.footprint.footprint import Footprint, StepShape, fits_within, largest_micro_batch, predicted_peak
from wellfed.planning.memory_candidates import limit_bytes
from wellfed.planning.planned import Planned, RunPlan
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
    assert plan.budget_gib is not None
    micro, said, fits = int(plan["memory.micro_batch"]), list[str](), False
    for _ in range(MOST_PROBES):
        measured = probe(micro)
        if measured is None:
            said.append(f"{micro} at a time ran out of memory")
            smaller = micro // 2
        else:
            limit, left = _limit(plan.budget_gib, room())
            predicted = predicted_peak(footprint, micro, StepShape(micro, workspaces=step.workspaces)).reserved_bytes
            told = f"a step of {micro} alone took {show_bytes(measured)} where {show_bytes(predicted)} were predicted"
            said.append(told + left)
            beyond = max(0, measured - predicted)
            fits = fits_within(footprint, micro, step, limit - beyond)
            if fits:
                break
            # If all sizes need as many times more; what part of it does not grow with them, the next probe shows.
            smaller = min(micro - 1, largest_micro_batch(footprint, limit * predicted // (predicted + beyond), step))
        if micro == 1 or not may_split:
            break
        micro = max(1, smaller)
    return _decided(plan, footprint, step, micro, "; ".join(said), fits=fits)


def _limit(budget_gib: float, room_bytes: int | None) -> tuple[int, str]:
    """Bytes to plan with, and what to say where the card has less than the budget."""
    if room_bytes is None or gib(room_bytes) >= budget_gib:
        return limit_bytes(budget_gib), ""
    return limit_bytes(gib(room_bytes)), f", and beside CUDA's context the card has {show_bytes(room_bytes)}"


def _decided(plan: RunPlan, footprint: Footprint, step: StepShape, micro: int, said: str, *, fits: bool) -> RunPlan:
    planned = plan.knobs["memory.micro_batch"]
    if not fits:
        warning = f"Memory may run out at memory.micro_batch={micro}: {said}. A smaller workload.model needs less."
        plan = replace(plan, warnings=(*plan.warnings, warning))
    knobs = {**plan.knobs, "memory.micro_batch": Planned(micro, f"{planned.because}; {said}", "measured")}
    if micro == planned.value:
        return replace(plan, knobs=knobs)
    sums = f"{step.samples} samples a device in micro-batches of {micro}"
    knobs["memory.accumulate"] = Planned(math.ceil(step.samples / micro), sums, "measured")
    knobs["memory.micro_batch"] = Planned(micro, f"{planned.value} were planned; {said}", "measured")
    peak = predicted_peak(footprint, micro, step)
    return replace(
        plan,
        knobs=knobs,
        parts=peak.parts,
        predicted_peak_gib=gib(min(peak.reserved_bytes, limit_bytes(plan.budget_gib or 0))),
        peak_moment=peak.moment,
    )
