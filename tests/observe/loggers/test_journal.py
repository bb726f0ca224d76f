import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.tables import rows_of
from wellfed.observe.loggers.csv_table import cell
from wellfed.observe.loggers.journal import METRIC_COLUMNS, STEP_COLUMNS, Journal, step_line, telemetry_line
from wellfed.observe.telemetry.metrics import COLUMNS
from wellfed.observe.telemetry.series import HOST, Sample
from wellfed.observe.timing.readiness import StepTable
from wellfed.observe.timing.step_clock import PHASE_COLUMNS, StepRow
from wellfed.record.entries import RunRecord, read


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


def test_files_and_record_after_save(tmp_path):
    made = journal(tmp_path)
    made.steps([row(1), row(2, asked_wait_ms=0)])
    made.metrics("val", {"loss": 0.5, "accuracy": 0.25}, step=2, epoch=0)
    made.save()
    steps = rows_of(tmp_path / "steps.csv")
    assert tuple(steps[0]) == STEP_COLUMNS
    assert [(entry["step"], entry["copy_ms"], entry["ready"]) for entry in steps] == [("1", "", "0"), ("2", "", "1")]
    assert [(entry["build_ms"], entry["build_cpu_ms"], entry["launch_ms"]) for entry in steps] == [("", "", "")] * 2
    metrics = rows_of(tmp_path / "metrics.csv")
    assert tuple(metrics[0]) == METRIC_COLUMNS
    assert [(entry["split"], entry["name"], entry["value"]) for entry in metrics] == [
        ("val", "loss", "0.5"), ("val", "accuracy", "0.25"),
    ]  # fmt: skip
    assert read(tmp_path)["status"] == "running"


times = st.floats(0, 1e5)


@given(st.builds(row, st.integers(1, 10**6), time_s=times, wait_ms=times, copy_ms=st.none() | times, compute_ms=times,
                 host_ms=times, asked_wait_ms=times, build_ms=st.none() | times, build_cpu_ms=times,
                 launch_ms=st.none() | times, slowest_ms=st.none() | times,
                 slowest_index=st.none() | st.integers(0, 9), warmup=st.booleans(), copy_ahead_ms=st.none() | times,
                 **{name: st.none() | st.floats(0, 999) for name in PHASE_COLUMNS}))  # fmt: skip
def test_a_line_of_a_step_has_the_cells_of_any_table(made):
    assert step_line(made).split(",") == [cell(getattr(made, name)) for name in STEP_COLUMNS]


@given(st.dictionaries(st.sampled_from(COLUMNS[4:]), st.floats(-1e6, 1e6)), st.sampled_from([-1, 0, 10]))
def test_a_line_of_a_reading_has_the_cells_of_any_table(values, gpu):
    sample = Sample(12.5, 7, "train", gpu, values)
    known = {"time_s": 12.5, "step": 7, "phase": "train", "gpu": gpu, **values}
    assert telemetry_line(sample).split(",") == [cell(known.get(name)) for name in COLUMNS]


def recent_rate(made):
    recent = made.recent(50)
    return None if recent is None else recent.samples_per_s


def test_steps_that_are_finished_and_not_yet_handed_over_count(tmp_path):
    made, finished = journal(tmp_path), [row(1), row(2)]
    made.finished_steps = lambda: [finished.pop(0) for _ in finished.copy()]
    assert recent_rate(made) == pytest.approx(800)
    finished.append(row(3))
    made.save()
    assert [entry["step"] for entry in rows_of(tmp_path / "steps.csv")] == ["1", "2", "3"]
    assert StepTable.of(made.rows).column("step").tolist() == [1, 2, 3]


def test_the_sink_is_handed_rows_with_their_axes(tmp_path):
    sink = Kept()
    journal(tmp_path, sink=sink).metrics("train", {"loss": 0.5}, step=3, epoch=1)
    made = journal(tmp_path, sink=sink)
    made.steps([row(4)])
    made.metrics("train", {"loss": 0.4}, step=4, epoch=1, has_rate=True)
    first, second = sink.rows
    assert first == {"step": 3, "epoch": 1, "train/loss": 0.5}
    assert {
        "step": 4,
        "epoch": 1,
        "train/loss": 0.4,
        "throughput/samples_per_s": pytest.approx(800),
    }.items() <= second.items()
    assert {name for name in second if name.startswith("step/")} == {"step/wait_ms", "step/compute_ms", "step/host_ms"}
    made.save()
    names = [entry["name"] for entry in rows_of(tmp_path / "metrics.csv")]
    assert names == ["loss", "samples_per_s", "readiness_frac"]


def test_rows_beyond_the_step_to_resume_at_are_cut(tmp_path):
    made = journal(tmp_path)
    made.steps(row(step) for step in range(1, 6))
    made.metrics("val", {"loss": 0.5}, step=2, epoch=0)
    made.metrics("val", {"loss": 0.4}, step=4, epoch=0)
    made.save()
    journal(tmp_path).cut_after(3)
    assert [entry["step"] for entry in rows_of(tmp_path / "steps.csv")] == ["1", "2", "3"]
    assert [entry["step"] for entry in rows_of(tmp_path / "metrics.csv")] == ["2"]


@pytest.mark.parametrize("damaged", ["step,samples\n1,\0\n", "step\n1\n", "step,samples\n1\n"])
def test_over_a_damaged_table_a_run_goes_on_with_a_warning(tmp_path, caplog, damaged):
    (tmp_path / "steps.csv").write_text(damaged)
    assert journal(tmp_path).samples_written() == 0
    assert "steps.csv can't be read" in caplog.messages[0]
    (tmp_path / "steps.csv").write_text("epoch\n1\n")
    journal(tmp_path).cut_after(3)
    assert "steps.csv can't be cut back" in caplog.messages[1]
    assert len(caplog.messages) == 2


def test_an_evaluation_that_a_killed_run_had_done_is_written_once(tmp_path):
    made = journal(tmp_path)
    made.metrics("val", {"loss": 0.5}, step=2, epoch=0)
    made.metrics("val", {"loss": 0.4, "accuracy": 0.1}, step=3, epoch=0)
    made.save()
    made = journal(tmp_path)
    made.cut_after(3)
    made.metrics("val", {"loss": 0.3}, step=3, epoch=0)
    made.metrics("test", {"loss": 0.2}, step=3, epoch=0)
    made.save()
    found = [(entry["step"], entry["split"], entry["value"]) for entry in rows_of(tmp_path / "metrics.csv")]
    assert found == [("2", "val", "0.5"), ("3", "val", "0.1"), ("3", "val", "0.3"), ("3", "test", "0.2")]
    assert made.validations_written() == 2


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


def gpus(time_s, step=1, **values):
    """Returns a reading of two GPUs."""
    return [Sample(time_s, step, "train", gpu, {**values, "util_pct": 10.0 + gpu}) for gpu in (0, 1)]


def test_telemetry_is_a_row_a_sample_on_disk_at_once_and_one_row_for_the_sink(tmp_path):
    sink = Kept()
    made = journal(tmp_path, sink=sink)
    made.telemetry([])

    assert not (tmp_path / "telemetry.csv").exists()
    rounds = [gpus(1.25, step=3, power_w=70.5), [Sample(1.5, 4, "validate", HOST, {"cpu_pct": 230.0})]]
    for one in rounds:
        made.telemetry(one)
        made.publish(one)
    rows = rows_of(tmp_path / "telemetry.csv")
    assert tuple(rows[0]) == COLUMNS
    assert [{name: value for name, value in entry.items() if value} for entry in rows] == [
        {"time_s": "1.25", "step": "3", "phase": "train", "gpu": "0", "util_pct": "10", "power_w": "70.5"},
        {"time_s": "1.25", "step": "3", "phase": "train", "gpu": "1", "util_pct": "11", "power_w": "70.5"},
        {"time_s": "1.5", "step": "4", "phase": "validate", "gpu": "-1", "cpu_pct": "230"},
    ]
    assert sink.rows == [
        {
            "telemetry/time_s": 1.25,
            "gpu0/util_pct": 10.0, "gpu0/power_w": 70.5,
            "gpu1/util_pct": 11.0, "gpu1/power_w": 70.5,
        },
        {"telemetry/time_s": 1.5, "host/cpu_pct": 230.0},
    ]  # fmt: skip


def test_telemetry_is_cut_by_step_and_where_time_goes_on(tmp_path):
    """A run killed at 200 s, last saved at 100 s after step 5, from where its clock resumes."""
    made = journal(tmp_path)
    for time_s, step in ((90.0, 4), (99.0, 5), (150.0, 5), (99.5, 6)):
        made.telemetry(gpus(time_s, step))
    with (tmp_path / "telemetry.csv").open("a") as stream:
        stream.write("99.9,5,tra")
    made = journal(tmp_path, earlier_s=100.0)
    made.cut_after(5)
    made.telemetry(gpus(101.0, 5))
    assert [float(entry["time_s"]) for entry in rows_of(tmp_path / "telemetry.csv")] == [90, 90, 99, 99, 101, 101]


def test_rounds_and_events_of_other_threads_survive_saves(tmp_path, at_once):
    made = journal(tmp_path)
    num = 100
    at_once(
        num,
        lambda number: made.telemetry(gpus(0.0, step=number)),
        lambda number: made.event("gpu_lost", number),
        lambda number: made.save(),
        lambda number: made.cut_after(num),
        lambda number: json.loads(made.record.to_json()) and None,
    )
    made.save()
    assert [(int(entry["step"]), entry["gpu"]) for entry in rows_of(tmp_path / "telemetry.csv")] == [
        (number, gpu) for number in range(num) for gpu in "01"
    ]
    assert [event["step"] for event in read(tmp_path)["events"]] == list(range(num))
