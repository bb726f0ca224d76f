"""What a tune keeps of itself, and when an earlier one is a comparison."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from wellfed.study.study_files import TUNE, TuneFile
from wellfed.study.tune_gain import TuneGain, TurnsMeasured

FILE = TuneFile(
    name="mine",
    workload="recsys",
    sample_unit="triplets",
    start=("gpu=24gb",),
    trial_steps=200,
    code="abc",
    machine="a card",
    comparison=TurnsMeasured([1.0, None], [2.0, float("nan")], TuneGain(2.0, None, 1), 4.5),
)


def test_what_is_written_is_read_back_as_strict_json(tmp_path: Path) -> None:
    FILE.write(tmp_path)
    found = json.loads((tmp_path / TUNE.marker).read_text(), parse_constant=pytest.fail)
    assert (found["schema"], found["name"], found["start"]) == (2, "mine", ["gpu=24gb"])
    assert found["comparison"]["after"] == [2.0, None]
    assert found["comparison"]["gain"] == {"factor": 2.0, "ci95": None, "rounds": 1}
    assert FILE.differs_from_earlier(tmp_path) == []


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
    assert FILE.differs_from_earlier(tmp_path) == [told]


def test_another_start_or_another_budget_is_one(tmp_path: Path) -> None:
    replace(FILE, start=("gpu=8gb",), status="stopped").write(tmp_path)
    assert FILE.differs_from_earlier(tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 2}', "{}"])
def test_what_is_none_is_no_comparison(tmp_path: Path, text: str) -> None:
    (tmp_path / TUNE.marker).write_text(text)
    assert FILE.differs_from_earlier(tmp_path) == ["what it was asked can't be read"]
