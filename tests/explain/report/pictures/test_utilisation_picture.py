"""The curve of each GPU with its swing measured, of the processor where there is no GPU."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.made_run import made_run
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.pages.chart import PagePicture
from wellfed.explain.report.pictures.machine_pictures import utilisation
from wellfed.explain.report.pictures.picture_parts import TimeAxis
from wellfed.record import RunRecord


def drawn(folder: Path, **made: Any) -> list[PagePicture]:
    made_run(folder, metrics={}, **made)
    evidence = Evidence.read(folder)
    return list(utilisation(evidence, TimeAxis.of(evidence)))


def texts(picture: PagePicture) -> list[str]:
    return [text for chart in picture.charts for text in re.findall(r"<(?:b|span [^>]*|span)>([^<]+)<", chart.svg)]


def test_a_swing_has_its_period_as_a_ruler_and_its_levels(tmp_path: Path) -> None:
    (picture,) = drawn(tmp_path, steps=1200, period_s=9.5)
    assert "9.5 s" in texts(picture)
    assert {"6 %", "93 %"} <= set(texts(picture))
    assert [key.text for key in picture.keys] == ["utilisation", "levels of its swing"]
    assert {span.colour for span in picture.charts[0].spans} == {"validate", "checkpoint", "test"}


def test_a_swing_too_short_for_the_picture_gets_one_of_its_own(tmp_path: Path) -> None:
    picture, latest = drawn(tmp_path, steps=1200, step_ms=1000, period_s=9.5)
    assert "9.5 s" not in texts(picture)
    assert texts(latest).count("9.5 s") == 1
    assert latest.title == "The last 6 periods"
    assert latest.charts[0].axis.end - latest.charts[0].axis.begin < 6.1 * 9.5
    assert picture.charts[0].axis.title == "minutes since the run started"
    assert picture.caption.endswith(" readings: mean and range of those that lie together.")


@pytest.mark.parametrize("gpus", [2, 8])
def test_several_gpus_stand_below_each_other(gpus: int, tmp_path: Path) -> None:
    (picture,) = drawn(tmp_path, gpus=gpus)
    assert [text for text in texts(picture) if text.startswith("GPU")] == [f"GPU {gpu}" for gpu in range(gpus)]


def test_of_many_gpus_those_are_drawn_that_were_idle_most() -> None:
    at_s = np.arange(20.0)
    watched = {
        gpu: {"time_s": at_s, "step": at_s, "phase": np.full(20, 1.0), "util_pct": np.full(20, 90.0 - gpu)}
        for gpu in range(20)
    }
    evidence = Evidence(RunRecord("run"), curves=watched, watched=watched)
    (picture,) = utilisation(evidence, TimeAxis.of(evidence))
    assert [text for text in texts(picture) if text.startswith("GPU")] == [f"GPU {gpu}" for gpu in range(4, 20)]
    assert picture.caption.startswith("The 16 of 20 GPUs that were idle most.")


@pytest.mark.parametrize(
    ("made", "what"),
    [({"is_mig": True}, "SMs at work"), ({"gpus": 0}, "this run"), ({}, "utilisation")],
)
def test_what_a_card_does_not_tell_another_figure_stands_for(made: dict[str, Any], what: str, tmp_path: Path) -> None:
    (picture,) = drawn(tmp_path, **made)
    assert picture.charts[0].keys[0].text == what
    starts = "Cores at work over time" if what == "this run" else f"{what[0].upper()}{what[1:]} over time."
    assert picture.charts[0].told.startswith(starts)


def test_without_telemetry_there_is_none(tmp_path: Path) -> None:
    assert drawn(tmp_path, has_telemetry=False) == []
