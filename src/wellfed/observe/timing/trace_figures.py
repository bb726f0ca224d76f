"""Reads a trace of torch's profiler: which operations take time, and how far the host runs ahead of the device."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from wellfed.record import OperationEntry, ProfileEntry

STEP = "ProfilerStep#"
"""Name of the ranges of a step in a trace, before its number; a step may have several."""
BETWEEN = "(between operations)"
"""Name, among the operations of a CPU, for all else that its steps did: Python, the loop, waiting."""
MOST_OPERATIONS = 20
"""Maximum number of operations in the record; it keeps the largest."""
_OPERATIONS = ("cpu_op", "user_annotation")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_WITHIN = "DtoD"
"""Part of the name of a copy within a device."""
_AROUND = (STEP, "Optimizer.step#")
"""Names of ranges that may contain a whole step; their own time belongs to no operation."""
_BETWEEN_RANKS = "nccl"
"""Part of the name of a kernel that moves data between devices."""
Interval = tuple[float, float]
_CHUNK = 2**20
"""Characters read at a time. Traces may have hundreds of MB."""
_BEGINS = re.compile(r'"traceEvents"\s*:\s*\[')
_EVENT = re.compile(r'\{\s*"ph"')
_SEPARATOR = re.compile(r"[\s,]*")


class Span(NamedTuple):
    """Operation on a thread of the host or on a stream of a device."""

    kind: str
    """``cat`` of the trace: ``cpu_op``, ``user_annotation``, ``cuda_runtime``, ``cuda_driver``, ``kernel``,
    ``gpu_memcpy``, ``gpu_memset``, ..."""
    name: str
    start_us: float
    end_us: float
    lane: tuple[Any, Any]
    """Process and thread of the host, or device and stream."""
    correlation: int | None = None
    """Number that a call to CUDA shares with the work it launched."""
    operation: int | None = None
    """Number that an operation of torch shares with all work launched for it, ``External id`` of the trace."""


def figures(spans: Iterable[Span], *, last: int | None = None) -> ProfileEntry | None:
    """Returns the operations of the steps of a trace; None if it has no step.

    Work launched outside of the steps does not count, nor do steps after number ``last``.
    """
    host, launches, device, steps = _sorted_out(spans)
    whole = [step for step in steps if last is None or int(step.name.removeprefix(STEP)) <= last]
    windows = union([(step.start_us, step.end_us) for step in whole])
    num_steps, total_us = len({step.name for step in whole}), length_us(windows)
    if not num_steps or total_us <= 0:
        return None
    asked_at = {launch.correlation: launch.start_us for launch in launches}
    work = [one for one in device if _within(asked_at.get(one.correlation, one.start_us), windows)]
    kernels, copies = [one for one in work if one.kind == "kernel"], [one for one in work if _is_copy(one)]
    computing = union([(one.start_us, one.end_us) for one in kernels if _BETWEEN_RANKS not in one.name.lower()])
    copying = union([(one.start_us, one.end_us) for one in copies])
    copy_us = length_us(copying)
    busy_us = overlap_us(union([(one.start_us, one.end_us) for one in kernels]), windows)
    ahead_us = overlap_us(in_store(work, {one.correlation: one.end_us for one in launches}), windows)
    return {
        "steps": num_steps,
        "by": "device" if work else "cpu",
        "step_ms": total_us / num_steps / 1e3,
        "operations": _by_device(work, launches, host, num_steps) if work else _by_cpu(host, windows, num_steps),
        "device_busy_frac": busy_us / total_us if work else None,
        "copy_ms_per_step": copy_us / num_steps / 1e3 if work else None,
        "copy_under_compute_frac": overlap_us(copying, computing) / copy_us if copy_us else None,
        "host_ahead_frac": ahead_us / total_us if work else None,
    }


def in_store(work: Iterable[Span], launched_us: Mapping[int | None, float]) -> list[Interval]:
    """Returns the times when at least one kernel was launched but waited for an earlier one of its stream.

    A kernel on an idle stream takes some microseconds to begin, too. That does not mean that the host is ahead.

    Args:
        work: spans of devices, in any order.
        launched_us: end of the call that launched the work with this correlation.
    """
    found: list[Interval] = []
    busy_until: dict[object, float] = {}
    for one in sorted(work, key=lambda one: (one.start_us, one.end_us)):
        before_us = busy_until.get(one.lane, -math.inf)
        launch_us = launched_us.get(one.correlation, math.inf)
        if one.kind == "kernel" and launch_us < before_us:
            found.append((launch_us, one.start_us))
        busy_until[one.lane] = max(before_us, one.end_us)
    return union(found)


def self_times_us(host: Iterable[Span]) -> list[tuple[Span, float]]:
    """Returns each span with its time, without that of the spans within it on its thread."""
    lanes: dict[object, list[Span]] = defaultdict(list)
    for one in host:
        lanes[one.lane].append(one)
    found: list[tuple[Span, float]] = []
    for lane in lanes.values():
        lane.sort(key=lambda one: (one.start_us, -one.end_us))
        own_us = [one.end_us - one.start_us for one in lane]
        around: list[int] = []
        for index, one in enumerate(lane):
            while around and lane[around[-1]].end_us <= one.start_us:
                around.pop()
            if around:
                own_us[around[-1]] -= min(one.end_us, lane[around[-1]].end_us) - one.start_us
            around.append(index)
        found += zip(lane, own_us, strict=True)
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same times as disjoint intervals, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length_us(apart: Sequence[Interval]) -> float:
    """Returns the total length of disjoint intervals."""
    return sum(end - start for start, end in apart)


def overlap_us(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Returns the time that is in both; each comes from `union`."""
    total, one, other = 0.0, 0, 0
    while one < len(first) and other < len(second):
        total += max(0.0, min(first[one][1], second[other][1]) - max(first[one][0], second[other][0]))
        if first[one][1] < second[other][1]:
            one += 1
        else:
            other += 1
    return total


def _sorted_out(
    spans: Iterable[Span],
) -> tuple[list[Span], list[Span], list[Span], list[Span]]:
    """Returns operations of the host, calls to CUDA, work of devices, and steps."""
    host, launches, device, steps = [], [], [], []
    for one in spans:
        if one.kind in _OPERATIONS:
            host.append(one)
            if one.name.startswith(STEP):
                steps.append(one)
        elif one.kind in _LAUNCHES:
            launches.append(one)
        elif one.kind in _DEVICE:
            device.append(one)
    return host, launches, device, steps


def _by_device(
    work: Sequence[Span], launches: Sequence[Span], host: Sequence[Span], num_steps: int
) -> list[OperationEntry]:
    """Returns kernels and copies under the name of the operation that launched them, or else their own."""
    launched_by = {one.correlation: one.operation for one in launches}
    names = {one.operation: one.name for one in host if not one.name.startswith(STEP)}
    names.pop(None, None)
    named = [(names.get(one.operation or launched_by.get(one.correlation), one.name), one) for one in work]
    return _largest([(name, 1, one.end_us - one.start_us) for name, one in named], num_steps)


def _by_cpu(host: Sequence[Span], windows: Sequence[Interval], num_steps: int) -> list[OperationEntry]:
    own = [(one, own_us) for one, own_us in self_times_us(host) if _within(one.start_us, windows)]
    operations = [(one.name, 1, own_us) for one, own_us in own if not one.name.startswith(_AROUND)]
    between_us = sum(own_us for one, own_us in own if one.name.startswith(_AROUND))
    return _largest([*operations, (BETWEEN, num_steps, between_us)], num_steps)


def _largest(named_us: Sequence[tuple[str, int, float]], num_steps: int) -> list[OperationEntry]:
    """Returns the operations that take the most time, from names, calls and times."""
    calls: Counter[str] = Counter()
    times_us: dict[str, float] = defaultdict(float)
    for name, num_calls, took_us in named_us:
        calls[name] += num_calls
        times_us[name] += took_us
    all_us = sum(times_us.values())
    largest = sorted(times_us.items(), key=lambda item: -item[1])[:MOST_OPERATIONS]
    return [
        {
            "name": name,
            "calls": calls[name],
            "ms_per_step": took_us / num_steps / 1e3,
            "share_frac": took_us / all_us if all_us else 0.0,
        }
        for name, took_us in largest
    ]


def _is_copy(one: Span) -> bool:
    return one.kind == "gpu_memcpy" and _WITHIN not in one.name


def _within(time_us: float, windows: Sequence[Interval]) -> bool:
    index = bisect_right(windows, (time_us, math.inf)) - 1
    return index >= 0 and time_us < windows[index][1]


def spans(path: Path) -> Iterator[Span]:
    """Yields all events with a duration, in the order of the file; leaves out unreadable text between two events.

    Raises:
        OSError: the file can't be read.
        ValueError: not a trace, or incomplete.
    """
    with path.open(encoding="utf-8", errors="replace") as stream:
        for event in _events(stream, path):
            if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event:
                yield _span(event)


def _span(event: dict[str, Any]) -> Span:
    facts, start_us = event.get("args", {}), float(event["ts"])
    return Span(
        kind=str(event.get("cat", "")),
        name=str(event.get("name", "")),
        start_us=start_us,
        end_us=start_us + float(event["dur"]),
        lane=(event.get("pid"), event.get("tid")),
        correlation=facts.get("correlation"),
        operation=facts.get("External id"),
    )


def _events(stream: TextIO, path: Path) -> Iterator[Any]:
    """Yields the entries of the list ``traceEvents``; holds one chunk of the text at a time."""
    decode = json.JSONDecoder(strict=False).raw_decode
    text = stream.read(_CHUNK)
    begins = _BEGINS.search(text)
    if begins is None:
        raise ValueError(f"{path} is no trace: it does not begin with traceEvents.")
    position = begins.end()
    while True:
        position = _SEPARATOR.match(text, position).end()  # type: ignore[union-attr]  # it also matches the empty string
        if text.startswith("]", position):
            return
        try:
            event, position = decode(text, position)
        except json.JSONDecodeError as cause:
            following = _EVENT.search(text, position + 1)
            if following is not None:  # a name with a quotation mark, which kineto does not escape
                position = following.start()
                continue
            more = stream.read(_CHUNK)
            if not more:
                raise ValueError(f"{path} is no whole trace: {cause}") from cause
            text, position = text[position:] + more, 0
            continue
        yield event
