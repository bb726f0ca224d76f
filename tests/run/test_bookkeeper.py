"""Record and files of a run while it lasts."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.kit.composed import compose
from tests.kit.few import few
from wellfed.explain.diagnosis.finding import Finding
from wellfed.observe.loggers.sink import Sink
from wellfed.observe.timing.step_clock import StepRow
from wellfed.record.entries import RunRecord
from wellfed.run import closing, run_loggers
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.outcome import OK, Outcome
from wellfed.run.run_loggers import chosen_loggers


def books_of(folder, *overrides):
    return Bookkeeper(RunRecord.start("r"), folder, compose(["logger=none", *overrides]).config)


THROUGHPUT = {"samples_per_s": 80.0, "ci95": None, "steps": 9, "warmup_steps": 3, "sample_unit": "images"}
PLAN = SimpleNamespace(filled_in=lambda config: {**config, "seed": 7})


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


def test_figures_at_checkpoints_take_a_small_share_of_a_long_run(tmp_path, monkeypatch):
    """They cover 100,000 steps, and a checkpoint may come every second."""
    books, now_s, computed_s = books_of(tmp_path), [0.0], []
    summary = books.journal.summary

    def slow_summary():
        now_s[0] += 0.5
        computed_s.append(now_s[0])
        return summary()

    monkeypatch.setattr(books.journal, "summary", slow_summary)
    monkeypatch.setattr(books.journal, "time_s", lambda: now_s[0])
    for step in range(1, 101):
        now_s[0] += 1.0
        books.stepped(step, 0.5, 4)
        books.saved(step, "last.ckpt", {"train/loss": 1 / step})
        assert (recorded(tmp_path)["steps"], recorded(tmp_path)["metrics"]["train/loss"]) == (step, 1 / step)
    assert computed_s[0] == 1.5
    assert 3 <= len(computed_s) <= 5
    books.finish(OK, {})
    assert computed_s[-1] == now_s[0]


def test_time_in_phases_goes_on_from_that_of_the_earlier_part(tmp_path):
    record = RunRecord.start("r")
    record.phases = {"validate": {"total_s": 5.0, "times": 2}, "test": {"total_s": 1.0, "times": 1}}
    books = Bookkeeper(record, tmp_path, compose(["logger=none"]).config)
    for phase in ("validate", "train"):
        books.progress.enter(phase)
    for _ in range(2):  # each time anew
        books.saved(1, "last.ckpt", {})
    found = recorded(tmp_path)["phases"]
    assert found["validate"]["times"] == 3
    assert 5.0 <= found["validate"]["total_s"] < 5.5
    assert found["test"] == {"total_s": 1.0, "times": 1}


def test_a_run_that_goes_on_in_its_folder_counts_from_the_checkpoint(tmp_path):
    books = books_of(tmp_path)
    books.stepped(9, 1.0, 36)
    books.resumed_after(6, 0.75, in_place=True)
    assert (books.record.steps, books.record.epochs, books.record.samples) == (6, 0.75, 0)  # no steps.csv
    books.journal.event("resume", step=6)
    assert books.record.events[0]["step"] == 6


@pytest.mark.parametrize("measured", [None, 90.0])
def test_a_resumed_run_keeps_no_ceiling_of_an_earlier_process_beside_its_own_rate(tmp_path, measured):
    record = replace(RunRecord.start("r"), ceiling={"samples_per_s": 500.0}, throughput=THROUGHPUT)
    books = Bookkeeper(record, tmp_path, compose(["logger=none"]).config)
    books.saved(6, "last.ckpt", {})
    assert recorded(tmp_path)["ceiling"] == {"samples_per_s": 500.0}, "nor has it a rate of its own so far"
    times = {"wait_ms": 1.0, "copy_ms": 1.0, "compute_ms": 2.0, "host_ms": 0.0, "asked_wait_ms": 1.0}
    books.journal.steps(StepRow(step, 0.0, 0, 8, 8, 1, **times) for step in range(7, 40))
    books.ceiling(measured)
    books.finish(OK, {})
    assert recorded(tmp_path)["ceiling"] == (None if measured is None else {"samples_per_s": measured})


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


def test_a_rule_that_fails_costs_the_run_nothing(tmp_path, monkeypatch, caplog):
    def broken(evidence):
        raise KeyError("a rule")

    monkeypatch.setattr(closing, "conclude", broken)
    books_of(tmp_path).finish(OK, {})
    found = recorded(tmp_path)
    assert (found["status"], found["exit_code"], found["findings"]) == ("ok", 0, [])
    assert (tmp_path / "report.md").read_text()
    assert "could not be diagnosed" in caplog.text


@pytest.mark.parametrize(
    ("typed", "expected"),
    few(
        [
            (["logger=none"], []),
            (["logger=csv"], ["csv"]),
            (["logger=[tensorboard,wandb]", "logger.mode=offline"], ["wandb", "tensorboard"]),
            (["logger=csv", "logger.mlflow=true"], ["mlflow", "csv"]),
        ],
        2,
    ),
)
def test_the_chosen_loggers(typed, expected, all_installed):
    made = compose(typed)
    assert chosen_loggers(made.config.logger) == expected


def test_a_logger_gets_the_figures_of_the_run_and_its_decided_configuration(tmp_path):
    made, books = compose(["logger=csv"]), books_of(tmp_path, "logger=csv")
    books.open_loggers(made, PLAN)
    books.record.ceiling, books.record.steps = {"samples_per_s": 100.0}, 5
    books.journal.metrics("val", {"loss": 0.5}, step=5, epoch=0)
    books.finish(OK, {"val/loss": 0.5})
    folder = tmp_path / "csv" / "version_0"
    with (folder / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["step"], row["val/loss"], row["ceiling/samples_per_s"]) for row in rows] == [
        ("5", "0.5", ""),
        ("5", "0.5", "100.0"),
    ]
    assert "seed: 7\n" in (folder / "hparams.yaml").read_text()
    assert len(books.loggers) == 1


class Handed(Sink):
    """A sink that keeps what it is given at the end of a run, in order."""

    def __init__(self):
        self.got = []

    def table(self, name, columns, rows):
        self.got.append((name, list(columns), list(rows)))

    def file(self, name, path):
        self.got.append((name, path.read_bytes().decode(errors="replace")))

    def finish(self, summary, exit_code):
        self.got.append(summary)


def test_a_logger_gets_what_was_found_the_report_and_what_sums_the_run_up(tmp_path, monkeypatch):
    def conclude(evidence):
        evidence.record.findings = [Finding("slow_copy", "10 ms.", {}).entry()]

    monkeypatch.setattr(closing, "conclude", conclude)
    books = books_of(tmp_path)
    books.journal.sink = handed = Handed()
    record = books.record
    record.throughput = THROUGHPUT
    record.ceiling, record.readiness_frac = {"samples_per_s": 100.0}, 0.75
    record.memory = {"device": "a card", "budget_gib": 7.2, "predicted_peak_gib": None, "measured_peak_gib": 5.5}
    util = {"mean": 60.0, "p5": 10.0, "p50": 70.0, "p95": 90.0, "max": 95.0, "n": 9}
    record.gpus = {"0": {"util_pct": util}, "1": {"mem_used_gib": {"mean": 1.0, "max": 1.0}}}
    (tmp_path / "confusion.png").write_text("a picture")
    (tmp_path / "notes.txt").write_text("not for loggers")
    books.record.artifacts |= {"confusion": "confusion.png", "notes": "notes.txt"}
    books.finish(OK, {"val/loss": 0.5})
    table, page, picture, summary = handed.got
    assert picture == ("confusion", "a picture")
    assert table[:2] == ("findings", ["id", "severity", "message", "change"])
    assert [row[0] for row in table[2]] == ["slow_copy"]
    assert page == ("report", (tmp_path / "report.html").read_text())
    assert summary == {
        "val/loss": 0.5,
        "throughput/samples_per_s": 80,
        "throughput/readiness_frac": 0.75,
        "ceiling/samples_per_s": 100,
        "ceiling/headroom": pytest.approx(0.25),
        "memory/peak_gib": 5.5,
    }


def test_a_logger_that_cannot_be_opened_is_an_event_and_the_others_stay(tmp_path, all_installed, monkeypatch, caplog):
    def fail(run):
        raise OSError("no room")

    monkeypatch.setattr(run_loggers.lightning_loggers, "open_tensorboard", lambda folder, resumed_at: fail(folder))
    typed = ["logger=[tensorboard,csv]"]
    books = books_of(tmp_path, *typed)
    books.open_loggers(compose(typed), PLAN)
    (event,) = books.record.events
    assert (event["kind"], event["logger"], event["message"]) == (
        "logger_lost",
        "tensorboard",
        "tensorboard can't be started: no room",
    )
    assert "the files have every figure" in caplog.text
    assert [type(one).__name__ for one in books.loggers] == ["_Csv"]
