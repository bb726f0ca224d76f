"""Figures of profiled steps, from events of torch's profiler and from some made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from wellfed.observe.timing.trace_figures import BETWEEN, STEP, figures


def event(name: str, start_us: float, end_us: float, *, on: DeviceType = DeviceType.CPU, **more: Any) -> Any:
    span = SimpleNamespace(start=start_us, end=end_us, elapsed_us=lambda: end_us - start_us)
    facts = {"self_cpu_time_total": end_us - start_us, "kernels": [], "is_user_annotation": False, **more}
    return SimpleNamespace(name=name, time_range=span, device_type=on, **facts)


def launched(*durations_us: float) -> list[Any]:
    return [SimpleNamespace(duration=one) for one in durations_us]


def test_operations_of_a_cpu_have_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # torch reads it once in a process
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=3)) as profiler:
        for call in (torch.cumsum, torch.matmul, torch.matmul, torch.cumprod):  # before the steps, two, a failed one
            call(torch.ones(200, 200), torch.ones(200, 200) if call is torch.matmul else 0)
            if call is not torch.cumprod:
                profiler.step()
    found = figures(profiler.events() or (), 2)
    assert found is not None
    assert (found["steps"], found["by"], found["device_busy_frac"], found["copy_ms_per_step"]) == (2, "cpu", None, None)
    operations = {one["name"]: one for one in found["operations"]}
    assert operations["aten::mm"]["calls"] == 2
    assert operations[BETWEEN]["calls"] == 2
    assert not {"aten::cumsum", "aten::cumprod"} & set(operations)
    assert sum(one["ms_per_step"] for one in found["operations"]) == pytest.approx(found["step_ms"], rel=0.2)


def test_operations_of_a_device_have_the_time_of_their_kernels() -> None:
    gpu = {"on": DeviceType.CUDA}
    events = [
        event(STEP, 0, 1000, is_user_annotation=True),
        event(STEP, 1000, 2000, is_user_annotation=True),
        event(STEP, 0, 1500, is_user_annotation=True, **gpu),  # the same range, as the device shows it
        event("aten::mm", 10, 20, kernels=launched(300, 200)),
        event("aten::to", 30, 40, kernels=launched(100)),
        event("cudaLaunchKernel", 12, 15),
        event("sgemm", 100, 400, **gpu),
        event("sgemm", 300, 600, **gpu),
        event("Memcpy HtoD (Pinned -> Device)", 700, 800, **gpu),
        event("Memcpy DtoD", 800, 900, **gpu),
        event("sgemm", 2500, 2600, **gpu),  # after the steps
    ]
    found = figures(events, 2)
    assert found is not None
    assert (found["steps"], found["by"], found["step_ms"]) == (2, "device", 1.0)
    assert found["device_busy_frac"] == pytest.approx(500 / 2000)
    assert found["copy_ms_per_step"] == pytest.approx(0.05)
    assert found["operations"] == [
        {"name": "aten::mm", "calls": 2, "ms_per_step": 0.25, "share_frac": pytest.approx(5 / 6)},
        {"name": "aten::to", "calls": 1, "ms_per_step": 0.05, "share_frac": pytest.approx(1 / 6)},
    ]


def test_without_a_step_there_is_nothing() -> None:
    assert figures([event("aten::mm", 0, 9)], 5) is None
    assert figures([event(STEP, 0, 9)], 0) is None
