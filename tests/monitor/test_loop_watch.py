"""The readings and marks of one loop: by the host's clock, and by events where torch uses a device."""

import sys
from types import SimpleNamespace

import pytest

from wellfed.monitor.loop_watch import CSV_COLUMNS, LoopWatch, gpu_in_use, open_csv_for


class Event:
    """An event on a device whose clock ticks once per event."""

    ticks = 0

    def record(self, stream=None):
        Event.ticks += 1
        self.at = Event.ticks

    def query(self):
        return True

    def elapsed_time(self, end):
        return float(end.at - self.at)


@pytest.fixture
def torch_with_cuda(monkeypatch):
    """A torch with CUDA in use, which counts how often it is synchronised."""
    cuda = SimpleNamespace(is_used=True, synchronised=0)
    module = SimpleNamespace(
        cuda=SimpleNamespace(
            is_initialized=lambda: cuda.is_used,
            device_count=lambda: 1,
            current_device=lambda: 0,
            current_stream=lambda gpu: gpu,
            memory_stats_as_nested_dict=lambda gpu: {"reserved_bytes": {"all": {"peak": 2**20}}},
            Event=lambda enable_timing: Event(),
            synchronize=lambda gpu: setattr(cuda, "synchronised", cuda.synchronised + 1),
        )
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return cuda


def steps(watch, number):
    watch.enter("train")
    for _ in range(number):
        watch.steps.use_events()
        watch.steps.ask()
        watch.steps.got()
        watch.steps.copied()
        watch.steps.done()


def test_steps_are_timed_by_the_host_where_torch_is_not_there(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gpu_in_use() is None
    watch = LoopWatch(interval_s=0.5)
    steps(watch, 10)
    watch.steps.finish()
    found = watch.steps.latest(4)
    assert [row.step for row in found] == [10, 9, 8, 7]
    assert all(row.copy_ms is None for row in found)
    assert watch.steps.latest(0) == []
    assert watch.summary().steps.steps == 7
    assert "torch" not in sys.modules


def test_steps_are_timed_by_events_where_torch_uses_a_device(torch_with_cuda):
    watch = LoopWatch(interval_s=0.5)
    steps(watch, 10)
    assert torch_with_cuda.synchronised == 0
    watch.steps.finish()
    assert torch_with_cuda.synchronised == 1
    assert {(row.copy_ms, row.compute_ms) for row in watch.steps.latest(10)} == {(1.0, 1.0)}


@pytest.mark.parametrize(("host_steps", "is_seen"), [(2, True), (10, False)])
def test_a_device_that_is_used_from_the_first_steps_on_is_seen(torch_with_cuda, host_steps, is_seen):
    torch_with_cuda.is_used = False
    watch = LoopWatch(interval_s=0.5)
    steps(watch, host_steps)
    torch_with_cuda.is_used = True
    steps(watch, 5)
    assert (watch.steps.latest(1)[0].copy_ms is not None) == is_seen


def test_what_nobody_marks_is_unknown():
    watch = LoopWatch(interval_s=0.5)
    assert watch.summary().unknown == {"wait_frac"}
    watch.steps.ask()
    assert watch.summary().unknown == frozenset()


def test_only_a_few_troubles_are_noted():
    watch = LoopWatch(interval_s=0.5)
    watch._event("metric_absent", metrics=["power_w"], reason="not supported")
    for number in range(20):
        watch._event("gpu_lost", gpu=number, message="It is lost.")
    assert watch.summary().notes == tuple(f"GPU {number}: It is lost." for number in range(5))


def test_a_table_is_begun_anew_or_gone_on_with(tmp_path):
    path, told = tmp_path / "telemetry.csv", []
    for is_new, expected in ((True, 2), (False, 3), (True, 2)):
        table = open_csv_for(path, 0, told.append, is_new=is_new)
        table.append({"time_s": 1.0})
        table.flush()
        lines = path.read_text().splitlines()
        assert (lines[0], len(lines)) == (",".join(CSV_COLUMNS), expected)
    assert told == []
