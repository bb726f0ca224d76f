"""Step times part upon part: long steps don't flatten the others, events and swings are marked."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.diagnosis.evidence_of import evidence
from wellfed.diagnosis.evidence import Evidence
from wellfed.report.picture_parts import PagePicture
from wellfed.report.step_time_picture import step_time
from wellfed.report.time_axis import TimeAxis


def drawn(of: Evidence) -> PagePicture:
    (picture,) = step_time(of, TimeAxis.of(of))
    return picture


def keys(picture: PagePicture) -> list[str]:
    return [key.text for key in picture.keys]


def swing(steps: int) -> dict[str, Any]:
    return {"period_s": 0.4, "period_steps": steps, "cause": "epoch", "r2": 0.5}


def test_one_long_step_is_told_and_flattens_no_other() -> None:
    compute_ms = np.full(400, 10.0)
    compute_ms[7] = 5000.0
    picture = drawn(evidence(steps=400, columns={"compute_ms": compute_ms}))
    assert picture.caption.endswith("The longest, step 8, took 5.0 s.")
    heights = [float(text) for text in re.findall(r">(\d+)</text>", picture.svg)]
    assert 10 <= max(heights) < 50


def test_parts_that_were_not_measured_are_left_out() -> None:
    assert keys(drawn(evidence())) == ["wait", "compute", "host"]
    assert keys(drawn(evidence(copy_ms=1.0))) == ["wait", "copy", "compute", "host"]


def test_what_happened_is_marked_and_what_happens_every_day_is_not() -> None:
    kinds = ["checkpoint", "oom", "oom", "resume", "metric_absent", "nan"]
    events = [{"kind": kind, "step": 5, "time_s": 0.1 * place} for place, kind in enumerate(kinds)]
    found = [key for key in drawn(evidence(events=events)).keys if key.kind == "mark"]
    assert [(key.text, key.mark) for key in found] == [("oom, 2 times", "▼"), ("resume", "▲"), ("nan", "■")]


def test_the_warm_up_is_shaded() -> None:
    of = evidence(steps=50)
    assert of.record.throughput is not None
    of.record.throughput["warmup_steps"] = 3
    assert "warm-up" in keys(drawn(of))


def test_a_swing_of_steps_is_shown_step_by_step() -> None:
    wait_ms = np.where(np.arange(400) % 8 == 0, 30.0, 1.0)
    picture = drawn(evidence(steps=400, columns={"wait_ms": wait_ms}, swing=swing(8)))
    assert "8 steps, 400 ms" in picture.svg
    assert "steps: the last 6 periods" in picture.svg


def test_a_swing_of_pauses_shows_them() -> None:
    between_ms = np.where(np.arange(400) % 20 == 0, 100.0, 0.0)
    config = {"trainer": {"checkpoint_every_steps": 20}}
    columns = {"time_s": np.cumsum(10.1 + between_ms) / 1e3}
    picture = drawn(evidence(steps=400, config=config, columns=columns, swing=swing(20)))
    assert "what lay before the step" in keys(picture)


def test_a_period_that_the_run_is_too_short_for_or_that_is_long_breaks_nothing() -> None:
    assert "periods" not in drawn(evidence(steps=30, swing=swing(20))).svg
    assert "the last 2 periods" in drawn(evidence(steps=2000, swing=swing(900))).svg


def test_without_steps_there_is_none() -> None:
    of = evidence(steps=0)
    assert list(step_time(of, TimeAxis.of(of))) == []
