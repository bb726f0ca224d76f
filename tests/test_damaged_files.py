"""Damaged run.json files: each reader refuses them in one sentence, and none hides another run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.made_run import made_run
from wellfed.cli import main as cli
from wellfed.observe.loggers.journal import MOST_OF_A_KIND, Journal
from wellfed.record.entries import FILE_NAME, RunRecord


@pytest.mark.parametrize("text", ["{}", "[]", "null", "", "\x00" * 99, '{"schema": 2}', "{"])
def test_what_is_no_record_is_refused_in_one_sentence_and_hides_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    good, bad = (tmp_path / "logs" / "recsys" / "runs" / name for name in ("good", "bad"))
    for folder in (good, bad):
        folder.mkdir(parents=True)
    made_run(good, steps=10)
    (bad / FILE_NAME).write_text(text)
    assert cli.main(["runs", "--log-dir", str(tmp_path / "logs")]) == 0
    out = capsys.readouterr().out
    assert "good" in out
    assert "damaged" in out
    for command in ("diagnose", "report"):
        assert cli.main([command, str(bad)]) == 2
        told = capsys.readouterr().err
        assert FILE_NAME in told
        assert "Traceback" not in told


@pytest.mark.parametrize(
    ("name", "value"),
    [("overrides", None), ("plan", None), ("steps", "9"), ("metrics", "x"), ("metrics", {"val/loss": "x"})],
)
def test_a_record_with_a_wrong_value_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    made_run(tmp_path, steps=10)
    record = json.loads((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(json.dumps({**record, name: value}))
    (tmp_path / "checkpoints").mkdir()
    torch.save({}, tmp_path / "checkpoints" / "last.ckpt")
    evaluated = f"checkpoint={tmp_path / 'checkpoints' / 'last.ckpt'}"
    for words in (["diagnose", str(tmp_path)], ["report", str(tmp_path)], ["train", f"resume={tmp_path}"]):
        assert cli.main(words) == 2
        assert f"{FILE_NAME} is damaged: {name} can't be " in capsys.readouterr().err
    assert cli.main(["evaluate", evaluated]) == 2
    assert f"{FILE_NAME} is damaged: {name} can't be " in capsys.readouterr().err


def test_events_of_a_kind_are_bounded_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    journal = Journal(RunRecord.start("x"), tmp_path)
    journal.event("resume")
    for step in range(3 * MOST_OF_A_KIND):
        journal.event("sample_skipped", step=step, message="x" * 20)
    events = journal.record.events
    skipped = [event for event in events if event["kind"] == "sample_skipped"]
    assert len(skipped) == MOST_OF_A_KIND
    assert (skipped[0]["step"], skipped[-1]["step"]) == (0, MOST_OF_A_KIND - 1)
    assert sum(event.get("left_out", 0) for event in skipped) == 2 * MOST_OF_A_KIND
    journal.save()
    assert (tmp_path / FILE_NAME).stat().st_size < 2e5
