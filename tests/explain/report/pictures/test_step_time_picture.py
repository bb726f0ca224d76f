"""Step times part upon part: long steps don't flatten the others, events and swings are marked."""

import re
from typing import Any

import numpy as np

from tests.kit.evidence_of import evidence
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.chart import PagePicture
from wellfed.explain.report.pictures.picture_parts import TimeAxis
from wellfed.explain.report.pictures.step_time_picture import parts_of, step_time


def drawn(of: Evidence) -> PagePicture:
    return next(step_time(of, TimeAxis.of(of)))


def folded(of: Evidence) -> PagePicture:
    _, picture = step_time(of, TimeAxis.of(of))
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
    heights = [float(text) for text in re.findall(r"class=y [^>]*>(\d+)<", picture.charts[0].svg)]
    assert 10 <= max(heights) < 50


def test_parts_that_were_not_measured_are_left_out() -> None:
    assert keys(drawn(evidence())) == ["wait", "compute", "host"]
    assert keys(drawn(evidence(copy_ms=1.0))) == ["wait", "copy", "compute", "host"]


def test_compute_is_drawn_by_phase_where_it_is_known() -> None:
    columns = {"forward_ms": np.full(100, 3.0), "backward_ms": np.full(100, 5.0), "optimizer_ms": np.full(100, 1.0)}
    picture = drawn(evidence(columns=columns))
    assert keys(picture) == ["wait", "forward", "backward", "optimizer", "other compute", "host"]
    colours = [key.colour for key in picture.keys]
    assert len(set(colours)) == len(colours)
    for_gpu = {f"device_{name}": column for name, column in columns.items()}
    assert "forward" in keys(drawn(evidence(copy_ms=1.0, columns=for_gpu)))
    assert "forward" not in keys(drawn(evidence(copy_ms=1.0, columns=columns)))


def test_steps_before_phases_were_timed_keep_their_compute_as_a_whole() -> None:
    since = np.arange(100) >= 60  # resumed with a version that times them
    each = {"forward_ms": 3.0, "backward_ms": 5.0, "optimizer_ms": 2.0}
    of = evidence(columns={name: np.where(since, ms, np.nan) for name, ms in each.items()})
    parts = parts_of(of)
    assert list(parts) == ["wait", "compute", "forward", "backward", "optimizer", "host"]
    assert parts["compute"].tolist() == [10.0] * 60 + [0.0] * 40
    assert parts["forward"].tolist() == [0.0] * 60 + [3.0] * 40
    colours = [key.colour for key in drawn(of).keys]
    assert len(set(colours)) == len(colours)


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


def test_later_warm_up_is_shaded_in_its_place() -> None:
    marks = np.isin(np.arange(100), (0, 1, 2, 50, 51)).astype(float)
    at_s = np.arange(1.0, 101.0)
    picture = drawn(evidence(compute_ms=1000.0, host_ms=0.0, columns={"time_s": at_s, "warmup": marks}))
    shaded = [(span.begin, span.end) for span in picture.charts[0].spans if span.colour == "ink"]
    assert shaded == [(1.0, 3.0), (50.0, 52.0)]


def test_a_swing_of_steps_is_shown_step_by_step() -> None:
    wait_ms = np.where(np.arange(400) % 8 == 0, 30.0, 1.0)
    columns = {"wait_ms": wait_ms, "time_s": 0.05 * np.arange(1, 401)}
    picture = folded(evidence(steps=400, columns=columns, swing=swing(8)))
    assert "8 steps, 400 ms" in picture.charts[0].svg
    assert picture.title == "Steps of the last 6 periods"


def test_a_swing_of_pauses_shows_them() -> None:
    between_ms = np.where(np.arange(400) % 20 == 0, 100.0, 0.0)
    config = {"trainer": {"checkpoint_every_steps": 20}}
    columns = {"time_s": np.cumsum(10.1 + between_ms) / 1e3}
    picture = folded(evidence(steps=400, config=config, columns=columns, swing=swing(20)))
    assert "what lay before the step" in keys(picture)


def test_a_ruler_lies_over_a_period_that_took_as_long_as_it_says() -> None:
    wait_ms = np.where(np.arange(80) % 8 == 0, 30.0, 1.0)
    step_ms = np.where(np.arange(80) // 8 == 7, 50.0, 100.0)  # the others took twice as long
    columns = {"wait_ms": wait_ms, "time_s": np.cumsum(step_ms) / 1e3}
    (ruler,) = folded(evidence(steps=80, columns=columns, swing=swing(8))).charts[0].notes
    assert (ruler.x, ruler.until, ruler.text) == (57, 65, "8 steps, 400 ms")
    columns["time_s"] = 0.1 * np.arange(80)
    (ruler,) = folded(evidence(steps=80, columns=columns, swing=swing(8))).charts[0].notes
    assert ruler.text == "8 steps"


def test_a_gap_is_told_by_what_was_recorded_in_it() -> None:
    gaps_ms = np.zeros(100)
    gaps_ms[[13, 40, 60, 80]] = 400, 300, 500, 900
    columns = {"time_s": np.cumsum(10.1 + gaps_ms) / 1e3}
    events = [
        {"kind": "checkpoint", "step": step, "time_s": float(columns["time_s"][step] - 0.05)} for step in (40, 60)
    ]
    profile = {"steps": 10, "by": "cpu", "operations": []}
    caption = drawn(evidence(columns=columns, events=events, profile=profile)).caption
    assert caption == (
        "100 steps. The gap of 400 ms before step 14: the profiler's trace was written."
        " 2 gaps, the longest of 500 ms before step 61: checkpoint."
    )


def test_a_period_that_the_run_is_too_short_for_or_that_is_long_breaks_nothing() -> None:
    of = evidence(steps=30, swing=swing(20))
    assert len(list(step_time(of, TimeAxis.of(of)))) == 1
    assert folded(evidence(steps=2000, swing=swing(900))).title == "Steps of the last 2 periods"


def test_without_steps_there_is_none() -> None:
    of = evidence(steps=0)
    assert list(step_time(of, TimeAxis.of(of))) == []
