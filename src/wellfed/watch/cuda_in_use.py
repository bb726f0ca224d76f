"""Finds the GPUs that a process trains on through torch, and a clock for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from wellfed.observe.timing.step_clock import OTHER, StepClock


def reserved_peaks() -> dict[int, int]:
    """Returns the most bytes that torch has reserved on each GPU that it uses in this process; 0 on all GPUs if the
    script has an allocator of its own, which does not count them."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    numbers = range(torch.cuda.device_count())
    try:
        stats = {gpu: torch.cuda.memory_stats_as_nested_dict(gpu) for gpu in numbers}
        return {gpu: peak for gpu, one in stats.items() if (peak := one["reserved_bytes"]["all"]["peak"])}
    except (RuntimeError, KeyError):
        return dict.fromkeys(numbers, 0)


def gpu_in_use() -> int | None:
    """Returns the number of torch's current GPU if torch uses it in this process, else the first it uses, or None."""
    used = reserved_peaks()
    current = torch.cuda.current_device() if used else None
    return current if current in used else min(used, default=None)


def device_clock(
    origin_s: float, gpu: int, current_stream: Callable[[], Any] | None = None, first_phase: int = OTHER
) -> StepClock:
    """Returns a clock with events of this GPU, whichever is the current one: an event on another GPU would take memory
    there, and time no work. ``current_stream``: as `StepClock` takes it; by default the GPU's current one."""
    event: Any = partial(torch.cuda.Event, enable_timing=True)
    stream = current_stream or partial(torch.cuda.current_stream, gpu)
    return StepClock(origin_s=origin_s, new_event=event, current_stream=stream, first_phase=first_phase)
