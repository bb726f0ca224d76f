"""A trace of some steps and their times, also for a run that fails or ends while they are recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import loop
from wellfed.observe.timing.step_clock import WARMUP_STEPS, StepRow
from wellfed.record.entries import ProfileEntry
from wellfed.train.loop import trace
from wellfed.train.loop.trace import record_steps
from wellfed.train.loop.training import Watchers

RANGE = "ProfilerStep#"


def steps_in(path: Path) -> list[str]:
    """Returns the numbers of the steps in a trace; torch counts from 0."""
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    return [name.removeprefix(RANGE) for name in names if name.startswith(RANGE)]


class Profiled:
    """A trace in a folder, with the list of its reports."""

    def __init__(self, folder: Path, steps: int = 4) -> None:
        self.path, self.found, self.events = folder / "profile" / "trace.json", [], []
        told: list[ProfileEntry] = self.found

        def note(kind: str, **facts: Any) -> None:
            self.events.append((kind, facts))

        self.trace = record_steps(self.path, steps, told.append, note)


def test_steps_behind_the_warm_up_are_recorded_and_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profiled = Profiled(tmp_path)
    loop.fit(loop.model(), watchers=Watchers(trace=profiled.trace))
    assert sorted(set(steps_in(profiled.path)), key=int) == ["1", "2", "3", "4"]
    ((found,), events) = profiled.found, profiled.events
    assert (found["steps"], found["by"], found["device_busy_frac"], events) == (4, "cpu", None, [])
    operations = {one["name"]: one for one in found["operations"]}
    assert operations["aten::addmm"]["calls"] == 4 * 2  # two layers; the 4 steps take 2 batches of 32, 1 of 6, 1 of 32
    assert 0.7 * found["step_ms"] < sum(one["ms_per_step"] for one in found["operations"]) < 1.001 * found["step_ms"]
    assert operations["(between operations)"]["calls"] == 4
    shares = [one["share_frac"] for one in found["operations"]]
    assert shares == sorted(shares, reverse=True)
    assert 0.5 < sum(shares) <= 1
    assert not torch.autograd._profiler_enabled()
    assert capfd.readouterr().err == ""


def test_profiled_steps_are_no_figures_of_the_run(tmp_path: Path) -> None:
    rows: list[StepRow] = []
    profiled = Profiled(tmp_path)
    loop.fit(loop.model(), watchers=Watchers(take_rows=rows.extend, trace=profiled.trace))
    slowed = WARMUP_STEPS + 4 + 1  # the trace is written before the last of them
    assert [row.step for row in rows if row.warmup] == list(range(1, slowed + 1))
    assert len(rows) == 20


@pytest.mark.parametrize(("max_steps", "recorded"), [(2, 0), (3, 0), (4, 1), (6, 3)])
def test_a_training_that_ends_before_tells_of_what_there_is(
    tmp_path: Path, max_steps: int, recorded: int, caplog: pytest.LogCaptureFixture
) -> None:
    profiled = Profiled(tmp_path, 10)
    loop.fit(loop.model(), watchers=Watchers(trace=profiled.trace), max_steps=max_steps)
    assert not torch.autograd._profiler_enabled()
    assert [one["steps"] for one in profiled.found] == ([recorded] if recorded else [])
    assert profiled.path.exists() == bool(recorded)
    assert profiled.events == []
    said = "No step was profiled: training ended before its step 4."
    assert [record.message for record in caplog.records if "profiled" in record.message] == [said] * (not recorded)


@pytest.mark.parametrize("failing_step", [2, 3, 8])
def test_a_run_that_fails_leaves_no_profiler_behind(tmp_path: Path, failing_step: int) -> None:
    """Fails before, while the profiler is prepared, and while it records; the process must not crash at its end."""

    def fail(size: int, call: int) -> Exception | None:
        return ValueError("a bug") if call == failing_step else None

    profiled = Profiled(tmp_path, 10)
    with pytest.raises(ValueError, match="a bug"):
        loop.fit(loop.model(fail=fail), watchers=Watchers(trace=profiled.trace))
    assert not torch.autograd._profiler_enabled()
    assert [one["steps"] for one in profiled.found] == ([4] if failing_step == 8 else [])
    if failing_step == 8:
        assert "5" in steps_in(profiled.path)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUPTI: insufficient privileges\nmore of it")


@pytest.mark.parametrize("part", ["stop_trace", "export_chrome_trace"])
def test_a_profiler_that_fails_costs_the_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    real = getattr(trace.profile, part)

    def fail(profiler: Any, *arguments: Any, **_: Any) -> None:
        if part == "stop_trace":  # what the test leaves behind must end
            real(profiler, *arguments)
        broken()

    monkeypatch.setattr(trace.profile, part, fail)
    profiled = Profiled(tmp_path)
    trained = loop.fit(loop.model(), watchers=Watchers(trace=profiled.trace))
    assert trained.number == 20
    ((kind, facts),) = profiled.events
    assert (kind, profiled.found) == ("profile_failed", [])
    assert "insufficient privileges" in facts["message"]
    assert "The steps could not be profiled" in caplog.text
    assert not torch.autograd._profiler_enabled()


@pytest.mark.simulated
def test_a_build_of_torch_that_can_not_record_a_card_records_the_host(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profiled = Profiled(tmp_path)
    loop.fit(loop.model(), watchers=Watchers(trace=profiled.trace), accelerator="gpu")
    assert sorted(set(steps_in(profiled.path)), key=int) == ["1", "2", "3", "4"]
    assert [one["by"] for one in profiled.found] == ["cpu"]
    assert "Failed to record" not in capfd.readouterr().err  # a stack of frames at every operation


@pytest.mark.simulated(lost_after=1500)
def test_a_card_that_is_lost_meanwhile_is_what_is_told(tmp_path: Path) -> None:
    placed, profiled = loop.model(), Profiled(tmp_path, 500)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        loop.fit(placed, watchers=Watchers(trace=profiled.trace), accelerator="gpu", max_steps=500)
    assert placed.model.calls > WARMUP_STEPS + 1  # it was recording
    assert not torch.autograd._profiler_enabled()
