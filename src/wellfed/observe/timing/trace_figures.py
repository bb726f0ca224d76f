"""Computes from the events of torch's profiler which operations take time, and how busy the device is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch._C._autograd import DeviceType

from wellfed.record.entries import OperationEntry, ProfileEntry

STEP = "ProfilerStep*"
"""Name that torch gives the range of each step among the events of its profiler."""
BETWEEN = "(between operations)"
"""Name, among the operations of a CPU, for all else that its steps did: Python, the loop, waiting."""
MOST_OPERATIONS = 20
"""Maximum number of operations in the record; it keeps the largest."""
_AROUND = (STEP, "Optimizer.step#")
"""Names of ranges around most of a step; their own time belongs to no operation."""
_COPY, _SET, _WITHIN = "Memcpy", "Memset", "DtoD"
"""Parts of the names of device events that are no kernels; the last is a copy within a device."""


def figures(events: Iterable[Any], num_steps: int) -> ProfileEntry | None:
    """Returns the operations of the steps of a profile; None if it has no step.

    Args:
        events: ``events()`` of `torch.profiler.profile`. Those outside of the steps do not count.
        num_steps: number of finished steps; a later one does not count.
    """
    every = list(events)
    ranges = [one for one in every if one.device_type == DeviceType.CPU and one.name == STEP]
    windows = sorted((one.time_range.start, one.time_range.end) for one in ranges)[:num_steps]
    num_steps, total_us = len(windows), sum(end - start for start, end in windows)
    if total_us <= 0:
        return None
    seen = [one for one in every if windows[0][0] <= one.time_range.start < windows[-1][1]]
    host = [one for one in seen if one.device_type == DeviceType.CPU]
    work = [one for one in seen if one.device_type != DeviceType.CPU and not one.is_user_annotation]
    kernels = [one for one in work if not one.name.startswith((_COPY, _SET))]
    copies = [one for one in work if one.name.startswith(_COPY) and _WITHIN not in one.name]
    copy_us = sum(one.time_range.elapsed_us() for one in copies)
    return {
        "steps": num_steps,
        "by": "device" if work else "cpu",
        "step_ms": total_us / num_steps / 1e3,
        "operations": _by_device(host, num_steps) if work else _by_cpu(host, num_steps),
        "device_busy_frac": _busy_us(kernels) / total_us if work else None,
        "copy_ms_per_step": copy_us / num_steps / 1e3 if work else None,
    }


def _by_device(host: Iterable[Any], num_steps: int) -> list[OperationEntry]:
    """Returns kernels and copies under the name of the operation that launched them."""
    launched = [(one.name, len(one.kernels), sum(each.duration for each in one.kernels)) for one in host]
    return _largest([each for each in launched if each[1]], num_steps)


def _by_cpu(host: Iterable[Any], num_steps: int) -> list[OperationEntry]:
    own = [(one.name, 1, one.self_cpu_time_total) for one in host]
    between_us = sum(took_us for name, _, took_us in own if name.startswith(_AROUND))
    operations = [each for each in own if not each[0].startswith(_AROUND)]
    return _largest([*operations, (BETWEEN, num_steps, between_us)], num_steps)


def _largest(named_us: Sequence[tuple[str, int, float]], num_steps: int) -> list[OperationEntry]:
    """Returns the operations that take the most time, from names, calls and times."""
    calls: Counter[str] = Counter()
    times_us: Any = Counter()
    for name, num_calls, took_us in named_us:
        calls[name] += num_calls
        times_us[name] += took_us
    all_us = sum(times_us.values()) or 1.0
    return [
        {"name": name, "calls": calls[name], "ms_per_step": us / num_steps / 1e3, "share_frac": us / all_us}
        for name, us in times_us.most_common(MOST_OPERATIONS)
    ]


def _busy_us(kernels: Iterable[Any]) -> float:
    """Returns the time in which at least one of these ran."""
    busy_us, until_us = 0.0, -math.inf
    for start, end in sorted((one.time_range.start, one.time_range.end) for one in kernels):
        busy_us += max(0.0, end - max(start, until_us))
        until_us = max(until_us, end)
    return busy_us
