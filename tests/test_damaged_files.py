"""Damaged run.json files: each reader refuses them in one sentence, and none hides another run."""

from pathlib import Path

import pytest

from tests.kit.made_run import made_run
from wellfed.cli import main as cli
from wellfed.observe.loggers.journal import MOST_OF_A_KIND, Journal
from wellfed.record.entries import FILE_NAME, RunRecord


@pytest.mark.parametrize("text", ["{}", "[]", "null", "", "\x00" * 99, '{"schema": 1}', "{"])
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
