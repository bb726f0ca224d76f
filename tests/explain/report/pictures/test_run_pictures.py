"""Pictures of utilisation and of steps: several GPUs, swings, parts of a step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.evidence_of import evidence
from tests.kit.made_run import made_run
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.chart import PagePicture
from wellfed.explain.report.pictures.machine_pictures import utilisation
from wellfed.explain.report.pictures.picture_parts import TimeAxis
from wellfed.explain.report.pictures.step_time_picture import step_time
from wellfed.record.entries import RunRecord


def of_machine(folder: Path, **made: Any) -> list[PagePicture]:
    made_run(folder, metrics={}, **made)
    found = Evidence.read(folder)
    return list(utilisation(found, TimeAxis.of(found)))


def of_steps(of: Evidence) -> PagePicture:
    return next(step_time(of, TimeAxis.of(of)))


def keys(picture: PagePicture) -> list[str]:
    return [key.text for key in picture.keys]


def test_a_swing_has_its_period_and_its_levels(tmp_path: Path) -> None:
    (picture,) = of_machine(tmp_path, steps=1200, period_s=9.5)
    assert "swings between 6 % and 93 %, with a period of 9.5 s" in picture.caption


@pytest.mark.parametrize("gpus", [2, 8])
def test_several_gpus_stand_below_each_other(gpus: int, tmp_path: Path) -> None:
    (picture,) = of_machine(tmp_path, gpus=gpus)
    assert [chart.title for chart in picture.charts] == [f"GPU {gpu}" for gpu in range(gpus)]


def test_of_many_gpus_those_are_drawn_that_were_idle_most() -> None:
    at_s = np.arange(20.0)
    watched = {
        gpu: {"time_s": at_s, "step": at_s, "phase": np.full(20, 1.0), "util_pct": np.full(20, 90.0 - gpu)}
        for gpu in range(20)
    }
    found = Evidence(RunRecord("run"), curves=watched, watched=watched)
    (picture,) = utilisation(found, TimeAxis.of(found))
    assert [chart.title for chart in picture.charts] == [f"GPU {gpu}" for gpu in range(4, 20)]


@pytest.mark.parametrize(("made", "what"), [({"is_mig": True}, "SMs at work"), ({}, "utilisation")])
def test_another_figure_stands_for_one_that_a_card_lacks(made: dict[str, Any], what: str, tmp_path: Path) -> None:
    (picture,) = of_machine(tmp_path, **made)
    assert picture.charts[0].keys[0].text == what


def test_without_telemetry_or_steps_there_is_none(tmp_path: Path) -> None:
    assert of_machine(tmp_path, has_telemetry=False) == []
    nothing = evidence(steps=0)
    assert list(step_time(nothing, TimeAxis.of(nothing))) == []


def test_one_long_step_is_told_and_flattens_no_other() -> None:
    compute_ms = np.full(400, 10.0)
    compute_ms[7] = 5000.0
    picture = of_steps(evidence(steps=400, columns={"compute_ms": compute_ms}))
    assert picture.caption.endswith("The longest, step 8, took 5.0 s.")
    assert 10 <= picture.charts[0].top < 50


def test_parts_of_a_step_are_those_that_were_measured() -> None:
    assert keys(of_steps(evidence())) == ["wait", "compute", "host"]
    assert keys(of_steps(evidence(copy_ms=1.0))) == ["wait", "copy", "compute", "host"]


def test_warm_up_is_shaded_in_its_place() -> None:
    marks = np.isin(np.arange(100), (0, 1, 2, 50, 51)).astype(float)
    columns = {"time_s": np.arange(1.0, 101.0), "warmup": marks}
    picture = of_steps(evidence(compute_ms=1000.0, host_ms=0.0, columns=columns))
    shaded = [(begin, end) for begin, end, colour in picture.charts[0].spans if colour == "ink"]
    assert shaded == [(1.0, 3.0), (50.0, 52.0)]
    assert "warm-up" in keys(picture)
