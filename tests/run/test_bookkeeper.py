"""What is written down while a run lasts."""

import json

from wellfed.config.compose import compose
from wellfed.record import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.outcome import OK, Outcome


def books_of(folder):
    return Bookkeeper(RunRecord.start("r"), folder, compose(["logger=none"]).config)


def recorded(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_checkpoint_is_an_event_and_brings_the_record_up_to_date(tmp_path):
    books = books_of(tmp_path)
    books.stepped(3, 0.5, 12)
    books.saved(3, "last.ckpt", {"train/loss": 0.25})
    found = recorded(tmp_path)
    assert (found["steps"], found["epochs"], found["samples"]) == (3, 0.5, 12)
    assert found["metrics"] == {"train/loss": 0.25}
    (event,) = found["events"]
    assert (event["kind"], event["step"], event["file"]) == ("checkpoint", 3, "last.ckpt")


def test_a_run_that_goes_on_in_its_folder_counts_from_the_checkpoint(tmp_path):
    books = books_of(tmp_path)
    books.stepped(9, 1.0, 36)
    books.go_on_after(6, 0.75, in_place=True)
    assert (books.record.steps, books.record.epochs, books.record.samples) == (6, 0.75, 0)  # no steps.csv
    books.journal.event("resume", step=6)
    assert books.record.events[0]["step"] == 6


def test_the_end_is_in_record_and_report_whatever_it_was(tmp_path):
    books_of(tmp_path).finish(OK, {"val/loss": 0.5})
    assert recorded(tmp_path)["status"] == "ok"
    assert (tmp_path / "report.md").read_text()
    books = books_of(tmp_path)
    books.finish(Outcome("interrupted", 130, None, "SIGINT"), {})
    found = recorded(tmp_path)
    assert (found["status"], found["exit_code"], found["events"][0]["kind"]) == ("interrupted", 130, "signal")
    books.finish(Outcome("failed", 1, "code", "ValueError: no", "Mend it."), {})
    assert recorded(tmp_path)["error"] == {"kind": "code", "message": "ValueError: no", "advice": "Mend it."}
