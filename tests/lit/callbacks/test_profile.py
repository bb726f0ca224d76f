"""A trace of some steps, also of a run that fails while they are recorded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.lit import tiny
from wellfed.lit.callbacks.profile import SKIPPED_STEPS, ProfilerTrace

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:lightning"),
    # Said by torch 2.13 of any profiler with a schedule.
    pytest.mark.filterwarnings("ignore:Profiler clears events:UserWarning"),
]


def steps_in(path: Path) -> int:
    """Steps that the trace shows."""
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]
    return len({name for name in names if name.startswith("ProfilerStep#")})


@pytest.mark.parametrize("failing_step", [2, 8])
def test_a_run_that_fails_leaves_no_profiler_behind(tmp_path: Path, failing_step: int) -> None:
    """Before and while it records; else the process would crash at its end."""

    def fail(size: int, call: int) -> Exception | None:
        return ValueError("a bug") if call == failing_step else None

    with pytest.raises(ValueError, match="a bug"):
        tiny.fit(tiny.module(fail=fail), tmp_path, [ProfilerTrace(tmp_path / "profile.json", 10)])
    assert not torch.autograd._profiler_enabled()
    if failing_step == 8:
        assert steps_in(tmp_path / "profile.json") == 3


@pytest.mark.simulated
def test_what_torch_can_not_record_of_a_card_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tiny.fit(tiny.module(), tmp_path, [ProfilerTrace(tmp_path / "profile.json", 4)], accelerator="gpu")
    assert steps_in(tmp_path / "profile.json") == 4
    assert [record.message for record in caplog.records if "torch can't record" in record.message] == [
        "This build of torch can't record what a card does: profile.json shows the host alone."
    ]
    assert "Failed to record" not in capfd.readouterr().err  # a stack of frames at every operation


@pytest.mark.simulated(lost_after=1500)
def test_a_card_that_is_lost_meanwhile_is_what_is_told(tmp_path: Path) -> None:
    module = tiny.module()
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        tiny.fit(module, tmp_path, [ProfilerTrace(tmp_path / "profile.json", 500)], accelerator="gpu", max_steps=500)
    assert module.model.calls > SKIPPED_STEPS + 1  # it was recording
    assert not torch.autograd._profiler_enabled()
