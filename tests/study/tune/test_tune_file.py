"""What a tune keeps of itself, and when an earlier one is a comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wellfed.study.points.guided.gain import TuneGain
from wellfed.study.tune import tune_file
from wellfed.study.tune.tune_file import TuneFile, TurnsMeasured

FILE = TuneFile(
    name="mine",
    workload="recsys",
    sample_unit="triplets",
    start=("gpu=24gb",),
    objective="samples_per_s",
    trial_steps=200,
    code="abc",
    machine="a card",
    comparison=TurnsMeasured([1.0, None], [2.0, float("nan")], TuneGain(2.0, None, 1), 4.5),
)


def test_what_is_written_is_read_back_as_strict_json(tmp_path: Path) -> None:
    FILE.write(tmp_path)
    found = tune_file.read(tmp_path)
    assert found is not None
    assert (found["schema"], found["name"], found["start"]) == (1, "mine", ["gpu=24gb"])
    assert found["comparison"]["after"] == [2.0, None]
    assert found["comparison"]["gain"] == {"factor": 2.0, "ci95": None, "rounds": 1}
    assert FILE.differs_from(found) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"code": "def"}, "the version of the code (def -> abc)"),
        ({"machine": "another"}, "the machine (another -> a card)"),
        ({"trial_steps": 20}, "sweep.trial_steps (20 -> 200)"),
    ],
)
def test_what_was_measured_otherwise_is_no_comparison(tmp_path: Path, change: dict[str, object], told: str) -> None:
    replace(FILE, **change).write(tmp_path)  # type: ignore[arg-type]
    earlier = tune_file.read(tmp_path)
    assert earlier is not None
    assert FILE.differs_from(earlier) == [told]


def test_another_start_or_another_budget_is_one(tmp_path: Path) -> None:
    replace(FILE, start=("gpu=8gb",), objective="peak_memory", status="stopped").write(tmp_path)
    earlier = tune_file.read(tmp_path)
    assert earlier is not None
    assert FILE.differs_from(earlier) == []


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"schema": 2}', "{}"])
def test_what_is_none_is_not_read(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / tune_file.FILE_NAME).write_text(text)
    assert tune_file.read(tmp_path) is None
