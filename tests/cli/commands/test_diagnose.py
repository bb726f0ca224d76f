"""``python -m wellfed diagnose RUN``: the findings of a run again, from its files."""

import json
from pathlib import Path

import pytest

from tests.kit.evidence_of import evidence, walled
from wellfed.cli import main as cli


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of one workload, the newer of which waits for its data."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs" / "recsys" / "runs"
    for name, more in {
        "2026-01-01_00-00-00_aaaa": {"ceiling": 1.01, "wall": walled(steps_s=1.0)},
        "2026-01-02_00-00-00_bbbb": {"wait_ms": 30.0, "plan": {"loader.num_workers": 1}},
    }.items():
        (folder / name).mkdir(parents=True)
        evidence(**more).record.write(folder / name)
    return folder


def test_the_newest_run_is_meant_where_none_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose"]) == 0
    out = capsys.readouterr().out
    assert "2026-01-02_00-00-00_bbbb\nok: 100 steps in " in out
    assert "unexplained (high): 74.8 % of training waits for data" in out
    assert "wait 75 % (30 ms)" in out


@pytest.mark.parametrize("by", ["name", "folder"])
def test_a_run_is_named_or_its_folder_is(runs: Path, capsys: pytest.CaptureFixture[str], by: str) -> None:
    name = "2026-01-01_00-00-00_aaaa"
    before = (runs / name / "run.json").read_bytes()
    assert cli.main(["diagnose", name if by == "name" else str(runs / name)]) == 0
    assert "99 % of the ceiling" in capsys.readouterr().out
    assert (runs / name / "run.json").read_bytes() == before
    assert sorted(path.name for path in (runs / name).iterdir()) == ["run.json"]


def test_findings_as_json_and_nothing_else(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "ok"
    assert found["findings"][0]["id"] == "unexplained"


def test_what_is_no_run_is_told_with_what_there_is(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", "2026-01-01_00-00-00_aaab"]) == 2
    error = capsys.readouterr().err
    assert "is neither the folder nor the name of a run in logs. There are: " in error
    assert error.index("bbbb") < error.rindex("aaaa")  # the newest first
    assert cli.main(["diagnose", str(runs)]) == 2
    assert "is neither the folder nor the name of a run" in capsys.readouterr().err


def test_a_record_of_another_schema_is_told_as_one(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs / "2026-01-01_00-00-00_aaaa"
    (folder / "run.json").write_text('{"schema": 7, "run_id": "x", "status": "ok"}')
    assert cli.main(["diagnose", str(folder)]) == 2
    assert "has schema 7; this version of wellfed reads schema 2" in capsys.readouterr().err


def test_where_there_are_no_runs_the_first_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["diagnose"]) == 2
    assert "logs: there is no run in logs yet. python src/train.py makes one." in capsys.readouterr().err
