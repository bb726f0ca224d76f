"""What a step spends its time on, told from traces as kineto writes them of CUDA, and counted by the microsecond."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellfed.observe.timing.trace_figures import (
    BETWEEN,
    Span,
    figures,
    in_store,
    length_us,
    overlap_us,
    self_times_us,
    spans,
    union,
)

HOST, DEVICE = 4242, 0
COMPUTE, COPIES = 7, 20
"""Streams."""


class Trace:
    """Events of steps on a GPU, in the words of kineto (torch 2.6 to 2.13, CUDA 12)."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "ts": 0, "pid": HOST, "tid": 0, "args": {"name": "python"}}
        ]
        self.number = 0

    def add(self, category: str, name: str, start: float, dur: float, lane: tuple[int, int], **facts: Any) -> None:
        pid, tid = lane
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": dur}
        self.events.append({**event, "args": facts})

    def step(self, number: int, start: float, dur: float) -> None:
        facts = {"External id": 1000 + number, "Record function id": 0, "Ev Idx": 0}
        self.add("user_annotation", f"ProfilerStep#{number}", start, dur, (HOST, HOST), **facts)
        self.add("gpu_user_annotation", f"ProfilerStep#{number}", start, dur, (DEVICE, COMPUTE), **facts)

    def launched(
        self, operation: str | None, name: str, asked: float, start: float, dur: float, stream: int = COMPUTE
    ) -> None:
        """An operation of 8 us, whose launch of 4 us begins 2 us later, and what it launched."""
        self.number += 1
        of = {"External id": self.number}
        if operation is not None:
            facts = {**of, "Record function id": 0, "Sequence number": 7, "Fwd thread id": 0, "Ev Idx": self.number}
            self.add("cpu_op", operation, asked, 8, (HOST, HOST), **facts)
        call = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}
        words = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
        category = words.get(name.split()[0], "kernel")
        joined = {**of, "correlation": 400 + self.number}
        self.add("cuda_runtime", call[category], asked + 2, 4, (HOST, HOST), **joined, cbid=211)
        on = {**joined, "queued": 0, "device": DEVICE, "context": 1, "stream": stream}
        self.add(category, name, start, dur, (DEVICE, stream), **on, grid=[8, 1, 1], block=[128, 1, 1])
        flow = {"id": 400 + self.number, "cat": "ac2g", "name": "ac2g"}
        self.events.append({**flow, "ph": "s", "pid": HOST, "tid": HOST, "ts": asked + 2})
        self.events.append({**flow, "ph": "f", "pid": DEVICE, "tid": stream, "ts": start, "bp": "e"})

    def figures(self, path: Path, last: int | None = None) -> Any:
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events, "traceName": str(path)}))
        return figures(spans(path), last=last)


H2D = "Memcpy HtoD (Pinned -> Device)"


def test_a_host_that_is_ahead(tmp_path: Path) -> None:
    """Three kernels are launched at once, and the copy of the next batch goes on beside them."""
    trace = Trace()
    for number in (4, 5):
        at = 1000.0 * number
        trace.step(number, at, 1000)
        trace.launched("aten::mm", "ampere_sgemm_128x64_tn", at, at + 20, 480)
        trace.launched("aten::mm", "ampere_sgemm_128x64_tn", at + 10, at + 500, 250)
        trace.launched("aten::add", "void at::native::vectorized_elementwise_kernel<4, ...>", at + 20, at + 750, 50)
        trace.launched("aten::copy_", H2D, at + 30, at + 700, 200, COPIES)
    found = trace.figures(tmp_path / "t.json")
    operations = found.pop("operations")
    assert found == {
        "steps": 2,
        "by": "device",
        "step_ms": 1.0,
        "device_busy_frac": pytest.approx(0.78),
        "copy_ms_per_step": pytest.approx(0.2),
        "copy_under_compute_frac": pytest.approx(0.5),
        # From the end of the second's launch, at 16, to the beginning of the third.
        "host_ahead_frac": pytest.approx(0.734),
    }
    assert [(one["name"], one["calls"], one["ms_per_step"]) for one in operations] == [
        ("aten::mm", 4, pytest.approx(0.73)),
        ("aten::copy_", 2, pytest.approx(0.2)),
        ("aten::add", 2, pytest.approx(0.05)),
    ]
    assert sum(one["share_frac"] for one in operations) == pytest.approx(1)


def test_a_host_that_launches_each_kernel_when_the_last_is_done(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(4, 0, 1000)
    for number in range(10):
        trace.launched("aten::add", "kernel", 100.0 * number, 100.0 * number + 11, 5)
    found = trace.figures(tmp_path / "t.json")
    assert (found["host_ahead_frac"], found["device_busy_frac"]) == (0, pytest.approx(0.05))
    assert (found["copy_ms_per_step"], found["copy_under_compute_frac"]) == (0, None)


def test_what_is_launched_between_two_steps_counts_for_none(tmp_path: Path) -> None:
    """A validation, of which CUDA's calls and kernels are recorded alone; a step that goes on behind it."""
    trace = Trace()
    trace.step(4, 0, 100)
    trace.launched("aten::mm", "kernel", 0, 20, 60)
    trace.launched(None, "validation", 200, 250, 500)
    trace.launched(None, H2D, 210, 250, 500, COPIES)
    trace.step(5, 900, 60)
    trace.launched("aten::mm", "kernel", 900, 920, 30)
    trace.step(5, 1000, 40)
    trace.launched("aten::mm", "kernel", 1000, 1010, 30)
    found = trace.figures(tmp_path / "t.json")
    assert (found["steps"], found["step_ms"], found["copy_ms_per_step"]) == (2, 0.1, 0)
    assert [(one["name"], one["calls"]) for one in found["operations"]] == [("aten::mm", 3)]
    assert found["device_busy_frac"] == pytest.approx(0.6)


def test_a_step_that_did_not_end_counts_for_none(tmp_path: Path) -> None:
    trace = Trace()
    for number in (4, 5):
        trace.step(number, 1000.0 * number, 100)
        trace.launched("aten::mm", "kernel", 1000.0 * number, 1000.0 * number + 20, 60)
    assert trace.figures(tmp_path / "t.json", last=4)["steps"] == 1
    assert trace.figures(tmp_path / "t.json", last=3) is None


def test_a_kernel_without_an_operation_goes_by_its_own_name(tmp_path: Path) -> None:
    """As Triton's, or one that is launched within a step and no operation."""
    trace = Trace()
    trace.step(4, 0, 100)
    trace.launched(None, "triton_poi_fused_add_0", 0, 20, 60)
    trace.events[-3]["args"]["External id"] = 1004  # the step's
    trace.events[-4] = {**trace.events[-4], "cat": "cuda_driver", "name": "cuLaunchKernelEx"}
    found = trace.figures(tmp_path / "t.json")
    assert [one["name"] for one in found["operations"]] == ["triton_poi_fused_add_0"]


def test_a_kernel_may_be_known_by_its_launch_alone(tmp_path: Path) -> None:
    """Some versions of kineto join it to no operation itself."""
    trace = Trace()
    trace.step(4, 0, 100)
    trace.launched("aten::mm", "kernel", 0, 20, 60)
    del trace.events[-3]["args"]["External id"]
    assert [one["name"] for one in trace.figures(tmp_path / "t.json")["operations"]] == ["aten::mm"]


def test_copies_within_a_device_are_no_copies_and_those_of_nccl_no_compute(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(4, 0, 1000)
    trace.launched("aten::copy_", "Memcpy DtoD (Device -> Device)", 0, 20, 60)
    trace.launched("aten::copy_", "Memcpy DtoH (Device -> Pinned)", 10, 100, 100, COPIES)
    trace.launched("nccl:all_reduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 20, 100, 400, 24)
    trace.launched("aten::zero_", "Memset (Device)", 30, 150, 10)
    found = trace.figures(tmp_path / "t.json")
    assert found["copy_ms_per_step"] == pytest.approx(0.1)
    assert found["copy_under_compute_frac"] == 0
    assert {one["name"] for one in found["operations"]} == {"aten::copy_", "nccl:all_reduce", "aten::zero_"}


def test_a_trace_without_a_step_tells_nothing(tmp_path: Path) -> None:
    assert Trace().figures(tmp_path / "t.json") is None


def test_on_a_cpu_each_operation_counts_without_those_it_calls(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(4, 0, 100)
    trace.events.pop()  # a device's
    for name, start, dur, thread in [
        ("aten::linear", 10, 55, HOST),
        ("Optimizer.step#AdamW.step", 5, 70, HOST),  # which may do all of a step
        ("aten::addmm", 20, 40, HOST),
        ("aten::copy_", 25, 5, HOST),
        ("aten::mm", 20, 30, 77),  # backward's thread
        ("aten::mm", 200, 30, HOST),  # behind the step
    ]:
        trace.add("cpu_op", name, start, dur, (HOST, thread))
    found = trace.figures(tmp_path / "t.json")
    assert found["by"] == "cpu"
    assert [(one["name"], one["calls"], one["ms_per_step"]) for one in found["operations"]] == [
        (BETWEEN, 1, 0.045),
        ("aten::addmm", 1, 0.035),
        ("aten::mm", 1, 0.030),
        ("aten::linear", 1, 0.015),
        ("aten::copy_", 1, 0.005),
    ]
    names = ("device_busy_frac", "copy_ms_per_step", "copy_under_compute_frac", "host_ahead_frac")
    assert [found[name] for name in names] == [None] * 4


def counted(intervals: Any) -> set[int]:
    """The microseconds within, of intervals with whole ends."""
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))))


@given(INTERVALS, INTERVALS)
def test_union_and_overlap_count_each_microsecond_once(first: Any, second: Any) -> None:
    apart = union(first)
    assert counted(apart) == counted(first)
    assert length_us(apart) == len(counted(first))
    assert all(before[1] < after[0] for before, after in pairwise(apart))
    assert overlap_us(apart, union(second)) == len(counted(first) & counted(second))


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[Span, int]]:
    """Kernels and copies one behind the other on two streams, each with the time when its launch had returned."""
    found, number = [], 0
    for stream in (COMPUTE, COPIES):
        free = 0
        for kind, launch, gap, dur in draw(
            st.lists(st.tuples(st.sampled_from(["kernel", "gpu_memcpy"]), *[st.integers(0, 12)] * 3), max_size=8)
        ):
            start = max(free, launch) + gap
            free = start + dur
            found.append((Span(kind, "k", start, free, (DEVICE, stream), number), launch))
            number += 1
    return found


@given(streams())
def test_a_kernel_is_in_store_from_its_launch_behind_another_until_it_begins(drawn: Any) -> None:
    work = [one for one, _ in drawn]
    expected = set()
    for place, (one, launch) in enumerate(drawn):
        earlier = [other for other in work[:place] if other.lane == one.lane]
        if one.kind == "kernel" and any(other.end_us > launch for other in earlier):
            expected |= set(range(launch, int(one.start_us)))
    found = in_store(reversed(work), {one.correlation: launch for one, launch in drawn})
    assert counted(found) == expected


@st.composite
def nested(draw: st.DrawFn) -> list[Span]:
    """Calls within calls on two threads."""
    found: list[Span] = []

    def within(start: int, end: int, thread: int, depth: int) -> None:
        while start < end and draw(st.booleans()):
            first = draw(st.integers(start, end))
            last = draw(st.integers(first, end))
            found.append(Span("cpu_op", f"op{len(found)}", first, last, (HOST, thread)))
            if depth:
                within(first, last, thread, depth - 1)
            start = last + 1

    for thread in (1, 2):
        within(0, 40, thread, 3)
    return found


@given(nested(), st.randoms())
def test_own_times_count_each_microsecond_for_the_innermost_call(calls: list[Span], random: Any) -> None:
    shuffled = list(calls)
    random.shuffle(shuffled)
    expected = dict.fromkeys((one.name for one in calls), 0)
    for thread in (1, 2):
        for moment in range(40):
            # Calls are listed before what they call.
            around = [one for one in calls if one.lane[1] == thread and one.start_us <= moment < one.end_us]
            if around:
                expected[around[-1].name] += 1
    found = {one.name: own_us for one, own_us in self_times_us(shuffled)}
    # Of calls with the same ends either may be the inner one.
    assert sum(found.values()) == sum(expected.values())
    if len({(one.lane, one.start_us, one.end_us) for one in calls}) == len(calls):
        assert found == expected
