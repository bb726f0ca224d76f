import csv
import json
import logging
import time

import pytest

from wellfed.record import RunRecord, read
from wellfed.timing.phases import StepRow
from wellfed.tracking.journal import METRIC_COLUMNS, STEP_COLUMNS, Journal


class Kept:
    def __init__(self):
        self.rows = []

    def log(self, row):
        self.rows.append(row)

    def finish(self, summary, exit_code):
        pass


def row(step, **changes):
    facts = {"time_s": step / 10, "epoch": 0, "samples": 8, "micro_batch": 4, "num_micro": 2, "wait_ms": 1.0,
             "copy_ms": None, "compute_ms": 8.0, "host_ms": 1.0, "asked_wait_ms": 1.0}  # fmt: skip
    return StepRow(step, **{**facts, **changes})


def journal(folder, **more):
    return Journal(RunRecord.start("r"), folder, **more)


def table(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_files_and_record_after_save(tmp_path):
    made = journal(tmp_path)
    made.steps([row(1), row(2, asked_wait_ms=0)])
    made.metrics("val", {"loss": 0.5, "accuracy": 0.25}, step=2, epoch=0)
    made.save()
    steps = table(tmp_path / "steps.csv")
    assert tuple(steps[0]) == STEP_COLUMNS
    assert [(entry["step"], entry["copy_ms"], entry["ready"]) for entry in steps] == [("1", "", "0"), ("2", "", "1")]
    metrics = table(tmp_path / "metrics.csv")
    assert tuple(metrics[0]) == METRIC_COLUMNS
    assert [(entry["split"], entry["name"], entry["value"]) for entry in metrics] == [
        ("val", "loss", "0.5"), ("val", "accuracy", "0.25"),
    ]  # fmt: skip
    assert read(tmp_path)["status"] == "running"


def test_the_sink_is_handed_rows_with_their_axes(tmp_path):
    sink = Kept()
    journal(tmp_path, sink=sink).metrics("train", {"loss": 0.5}, step=3, epoch=1)
    assert sink.rows == [{"step": 3, "epoch": 1, "train/loss": 0.5}]


def test_time_goes_on_from_earlier_parts_of_the_run(tmp_path):
    made = journal(tmp_path, earlier_s=1000.0)
    assert made.time_s() >= 1000
    assert made.origin_s <= time.monotonic() - 1000
    made.save()
    assert read(tmp_path)["duration_s"] >= 1000


def test_events_carry_step_time_and_facts(tmp_path):
    made = journal(tmp_path)
    made.event("oom", 7, message="x")
    (event,) = made.record.events
    assert (event["kind"], event["step"], event["message"]) == ("oom", 7, "x")
    assert event["time_s"] >= 0


def test_figures_are_those_of_the_steps(tmp_path):
    made = journal(tmp_path)
    assert made.summary() is None
    assert made.recent_rate() is None
    made.steps([row(1, warmup=True), *(row(step) for step in range(2, 80))])
    assert made.summary().samples_per_s == pytest.approx(800)
    assert (made.summary().steps, made.summary().warmup_steps) == (78, 1)
    made.steps(row(step, compute_ms=18.0) for step in range(80, 130))
    assert made.recent_rate() == pytest.approx(400)
    made.steps(row(step, compute_ms=38.0) for step in range(130, 340))
    assert made.recent_summary().steps == 200
    assert made.recent_summary().samples_per_s == pytest.approx(200)


def test_rows_beyond_the_step_to_resume_at_are_cut(tmp_path):
    made = journal(tmp_path)
    made.steps(row(step) for step in range(1, 6))
    made.metrics("val", {"loss": 0.5}, step=2, epoch=0)
    made.metrics("val", {"loss": 0.4}, step=4, epoch=0)
    made.save()
    journal(tmp_path).cut_after(3)
    assert [entry["step"] for entry in table(tmp_path / "steps.csv")] == ["1", "2", "3"]
    assert [entry["step"] for entry in table(tmp_path / "metrics.csv")] == ["2"]


def test_tables_that_cannot_be_cut_are_a_warning(tmp_path, caplog):
    (tmp_path / "steps.csv").mkdir()
    journal(tmp_path).cut_after(3)
    assert "steps.csv could not be cut back to step 3" in caplog.text


def test_a_full_disk_is_one_event_and_the_run_goes_on(tmp_path, caplog):
    made = journal(tmp_path)
    made.record.steps = 5
    made.save()
    before = (tmp_path / "run.json").read_text()
    for name in ("steps.csv", "metrics.csv"):
        (tmp_path / name).symlink_to("/dev/full")
    for step in (6, 7, 8):
        made.record.steps = step
        made.steps([row(step)])
        made.metrics("train", {"loss": 1.0}, step=step, epoch=0)
        made.save()
    events = read(tmp_path)["events"]  # the record is written all the same
    assert [(event["kind"], event["step"]) for event in events] == [("disk_full", 6)]
    assert "No space left" in events[0]["message"]
    assert caplog.text.count("can't be written") == 1
    assert (tmp_path / "run.json").read_text() != before
    for name in ("steps.csv", "metrics.csv"):
        (tmp_path / name).unlink()
    made.save()
    assert [entry["step"] for entry in table(tmp_path / "steps.csv")] == ["6", "7", "8"]
    assert [entry["step"] for entry in table(tmp_path / "metrics.csv")] == ["6", "7", "8"]


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    made = journal(tmp_path)
    made.record.steps = 5
    made.save()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wellfed.record.os.fsync", fail)
    made.record.steps = 6
    made.save()
    made.save()
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 5
    assert [event["kind"] for event in made.record.events] == ["disk_full"]
    monkeypatch.undo()
    made.save()
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 6


def test_events_reach_the_log(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        journal(tmp_path).event("checkpoint", 3)
    assert "event checkpoint at step 3" in caplog.text
