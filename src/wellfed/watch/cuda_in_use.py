"""Finds the GPUs that a process trains on through torch, and a clock for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wellfed.observe.timing.step_clock import OTHER, StepClock


def used_gpus() -> set[int]:
    """Returns the numbers of the GPUs on which torch has held memory in this process; all if it does not count that."""
    if not torch.cuda.is_initialized():
        return set()
    numbers = range(torch.cuda.device_count())
    try:
        held = {one: torch.cuda.memory_stats_as_nested_dict(one) for one in numbers}
        return {one for one, stats in held.items() if stats["reserved_bytes"]["all"]["peak"]}
    except (RuntimeError, KeyError):  # an allocator of the script's own
        return {*numbers}


def gpu_in_use() -> int | None:
    """Returns the number of torch's current GPU if it is among `used_gpus`, else their first; None without any."""
    used = used_gpus()
    current = torch.cuda.current_device() if used else None
    return current if current in used else min(used, default=None)


def device_clock(
    origin_s: float, gpu: int, current_stream: Callable[[], Any] | None = None, first_phase: int = OTHER
) -> StepClock:
    """Returns a clock with events of this GPU, whichever is the current one: an event on another GPU would take memory
    there, and time no work. ``current_stream``: as `StepClock` takes it; by default the GPU's current one."""
    event = partial(torch.cuda.Event, enable_timing=True)
    stream = current_stream or partial(torch.cuda.current_stream, gpu)
    return StepClock(origin_s=origin_s, new_event=event, current_stream=stream, first_phase=first_phase)
