"""Lines and table of a profile: what was seen, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from wellfed.record import PlanEntry, ProfileEntry, RunRecord
from wellfed.report.run_lines import profile_lines, profile_table
from wellfed.report.run_markdown import to_markdown

SEEN: ProfileEntry = {
    "steps": 10,
    "by": "device",
    "step_ms": 32.125,
    "operations": [
        {"name": "aten::mm", "calls": 40, "ms_per_step": 12.5, "share_frac": 0.625},
        {"name": "void at::native::" + "x" * 200, "calls": 5, "ms_per_step": 7.5, "share_frac": 0.375},
    ],
    "device_busy_frac": 0.9,
    "copy_ms_per_step": 1.25,
    "copy_under_compute_frac": 0.96,
    "host_ahead_frac": 0.875,
}
UNSEEN: Any = {
    **SEEN,
    "by": "cpu",
    **dict.fromkeys(("device_busy_frac", "copy_ms_per_step", "copy_under_compute_frac", "host_ahead_frac")),
}


def record_of(profile: ProfileEntry | None, accelerator: str = "gpu", asked: int = 10) -> RunRecord:
    entry: PlanEntry = {"value": accelerator, "because": "", "source": "set"}
    config = {"trainer": {"profile_steps": asked}}
    return RunRecord("r", profile=profile, plan={"trainer.accelerator": entry}, config=config)


def test_how_host_and_gpu_work_together_is_told_and_where_the_host_waits() -> None:
    record = record_of(SEEN)
    record.synchronisations = [{"place": "model.py:12", "per_step": 2.0}, {"place": "wellfed/a.py:3", "per_step": 0.5}]
    assert profile_lines(record) == [
        "10 steps recorded, 32.12 ms each: recording costs time, too",
        "the GPU ran kernels 90.0 % of the time, and had another in store 87.5 %: so long the host was ahead of it",
        "copies take 1.25 ms a step, 96.0 % of it while kernels run",
        "model.py:12 makes the host wait for the GPU, 2 times a step",
        "wellfed/a.py:3 makes the host wait for the GPU, 0.5 times a step",
    ]
    assert profile_table(record, 30) == (
        ["GPU ms a step", "share", "calls a step", "operation"],
        [
            ["12.500", "62.5 %", "4", "aten::mm"],
            ["7.500", "37.5 %", "0.5", "void at::native::xxxxxxxxxx..."],
        ],
    )
    assert len(profile_table(record, 30, most=1)[1]) == 1


def test_what_was_not_seen_of_a_gpu_is_said_and_on_a_cpu_there_is_nothing_to_say() -> None:
    first = "10 steps recorded, 32.12 ms each: recording costs time, too"
    said = "the host alone: this build of torch can't record what a GPU does"
    assert profile_lines(record_of(UNSEEN)) == [first, said]
    assert profile_lines(record_of(UNSEEN, "cpu")) == [first]
    assert profile_table(record_of(UNSEEN, "cpu"), 30)[0][0] == "CPU ms a step"


def test_fewer_steps_than_asked_for_are_told() -> None:
    first = profile_lines(record_of({**SEEN, "steps": 1}, asked=10))[0]
    assert first.startswith("1 step (of 10: training ended) recorded, ")


def test_a_run_without_a_profile_has_no_word_of_it() -> None:
    record = record_of(None)
    assert (profile_lines(record), profile_table(record, 30)[1]) == ([], [])
    assert "Profile" not in to_markdown(record)


@pytest.mark.parametrize("name", ["a|b\nc", "\x1b[31mred"])
def test_a_name_breaks_no_table(name: str) -> None:
    operations = [{**SEEN["operations"][0], "name": name}]
    text = to_markdown(record_of({**SEEN, "operations": operations}))  # type: ignore[typeddict-item]
    rows = text.partition("## Profile")[2].partition("\n## ")[0].strip().splitlines()
    assert rows[-1].replace("\\|", "").count("|") == 5
    assert rows[-1].startswith("| 12.500 | 62.5 % | 4 | ")
    assert "\x1b" not in text
