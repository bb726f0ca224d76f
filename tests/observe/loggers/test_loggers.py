"""Lightning's loggers opened for a run; their files are read back by their own packages."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tests.kit.tables import rows_of
from wellfed.observe.loggers.lightning_loggers import (
    LoggerSink,
    Quiet,
    for_trainer,
    open_csv,
    open_mlflow,
    open_tensorboard,
)

CONFIG = {"seed": 1, "loader": {"num_workers": 3, "backend": "threads"}}
ROWS: list[dict[str, Any]] = [
    {"step": 10, "epoch": 0, "train/loss": 0.5, "val/ndcg@10": None, "step/wait_ms": 1.5},
    {"telemetry/time_s": 2.5, "gpu0/util_pct": 40.0},
    {"step": 20, "epoch": 1, "train/loss": 0.25, "val/ndcg@10": 0.125},
]
SUMMARY = {"train/loss": 0.25, "ceiling/samples_per_s": 1000.0}


class Taken(list[dict[str, float]]):
    def __call__(self, values: Any) -> None:
        self.append(dict(values))


def test_numbers_are_handed_on_and_nothing_else(tmp_path: Path) -> None:
    taken = Taken()
    (logger,) = for_trainer([], taken, tmp_path)
    logger.log_metrics({"a": 1, "b": torch.tensor([2.5]), "text": "no", "many": torch.ones(3)}, step=4)
    logger.log_hyperparams({"lr": 1})
    logger.save()
    logger.finalize("success")
    assert taken == [{"a": 1.0, "b": 2.5}]


def test_code_for_any_logger_runs_without_one(tmp_path: Path) -> None:
    logger = Quiet(tmp_path)
    logger.experiment.add_image("a", torch.ones(3))
    logger.log_image("a", [torch.ones(3)])  # wandb's


TABLE = ("findings", ("id", "message"), [["slow_copy", "10 | 20 ms\nof a step"], ["healthy", "no <b>"]])
MARKDOWN = "| id | message |\n| --- | --- |\n| slow_copy | 10 / 20 ms of a step |\n| healthy | no <b> |\n"


def handed_at_the_end(sink: LoggerSink, folder: Path, exit_code: int = 0) -> None:
    """Trains as a run does."""
    page = folder / "report.html"
    page.write_text("<p>report")
    sink.table(*TABLE)
    sink.file("report", page)
    sink.finish(SUMMARY, exit_code)


def sink_of(logger: Any, *, steps: int = 20, is_new: bool = True) -> tuple[LoggerSink, list[str]]:
    """Returns the sink of a logger that has taken all rows."""
    lost: list[str] = []
    logger.begin(CONFIG, lambda: steps, lost.append, is_new=is_new)
    for row in ROWS:
        logger.log(row)
    return logger, lost


def test_csv_has_a_column_a_figure_and_is_on_disk_before_the_end(tmp_path: Path) -> None:
    sink, lost = sink_of(open_csv(tmp_path))
    file = tmp_path / "csv" / "version_0" / "metrics.csv"
    assert [row["train/loss"] for row in rows_of(file)] == ["0.5", "", "0.25"]
    handed_at_the_end(sink, tmp_path)
    rows = rows_of(file)
    assert [row["step"] for row in rows] == ["10", "20", "20", "20"]
    assert rows[1]["gpu0/util_pct"] == "40.0"
    assert rows[3]["ceiling/samples_per_s"] == "1000.0"
    assert yaml.safe_load((file.parent / "hparams.yaml").read_text()) == CONFIG
    sink.log(ROWS[0])  # too late
    assert len(rows_of(file)) == 4
    assert lost == []


def test_figures_of_a_module_reach_the_run_once_and_other_things_their_logger(tmp_path: Path) -> None:
    taken, loggers = Taken(), [open_csv(tmp_path), open_csv(tmp_path / "second")]
    for logger in for_trainer(loggers, taken, tmp_path):
        assert isinstance(logger, CSVLogger)
        logger.log_metrics({"a": torch.tensor(1.5)}, step=3)
        logger.save()
        logger.finalize("success")
    assert taken == [{"a": 1.5}]
    assert list(tmp_path.rglob("metrics.csv")) == []


def test_a_logger_that_fails_is_told_once_and_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = open_csv(tmp_path)
    sink, lost = sink_of(logger)
    (tmp_path / "csv" / "version_0" / "metrics.csv").unlink()
    (tmp_path / "csv" / "version_0" / "metrics.csv").mkdir()
    for row in ROWS:
        logger.log(row)
    logger.save()
    sink.finish(SUMMARY, 0)
    assert len(lost) == 1
    assert caplog.text.count("csv can't be written") == 1


@pytest.mark.guests
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_all_that_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = open_tensorboard(tmp_path, resumed_at=None)
    assert isinstance(logger, TensorBoardLogger)
    sink, lost = sink_of(logger)
    logger.experiment.add_image("digits", torch.zeros(3, 4, 4), 10)
    logger.finalize("success")  # of the Trainer that trained; the test comes after
    handed_at_the_end(sink, tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    curve = {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert curve["train/loss"] == [(10, 0.5), (20, 0.25), (20, 0.25)]
    assert curve["step/wait_ms"] == [(10, 1.5)]
    assert curve["gpu0/util_pct"] == [(20, 40.0)]
    assert curve["ceiling/samples_per_s"] == [(20, 1000.0)]
    assert found.Tags()["images"] == ["digits"]
    (text,) = found.Tensors("findings/text_summary")
    assert text.tensor_proto.string_val[0].decode() == MARKDOWN
    (session,) = [
        content
        for tag in ("_hparams_/session_start_info",)
        if (content := found.SummaryMetadata(tag).plugin_data.content)
    ]
    assert b"loader/num_workers" in session
    assert lost == []


@pytest.mark.guests
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_takes_back_what_lies_beyond_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink_of(open_tensorboard(tmp_path, resumed_at=None))[0].finish({}, 1)
    logger = open_tensorboard(tmp_path, resumed_at=15)
    logger.begin(CONFIG, lambda: 20, is_new=False)
    logger.log({"step": 20, "train/loss": 0.125})
    logger.finish({}, 0)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(10, 0.5), (20, 0.125)]


@pytest.mark.guests
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_all_that_was_logged_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    uri = f"file:{tmp_path / 'store'}"
    logger = open_mlflow(uri, experiment="wellfed", name="first", run_id=None)
    sink, lost = sink_of(logger)
    logger.finalize("success")  # of a Trainer
    logger.log_hyperparams({"seed": 7, "width": 3})  # a module's own, one of a name that is taken
    handed_at_the_end(sink, tmp_path, 1)
    client = MlflowClient(uri)
    run = client.get_run(logger.run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FAILED")
    params = run.data.params
    assert [params[name] for name in ("loader/num_workers", "seed", "hparams/seed", "width")] == ["3", "1", "7", "3"]
    assert lost == []
    assert run.data.metrics["ceiling/samples_per_s"] == 1000
    kept = Path(run.info.artifact_uri.removeprefix("file:"))
    assert {path.name: path.read_text() for path in kept.iterdir()} == {
        "findings.md": MARKDOWN,
        "report.html": "<p>report",
    }
    assert run.data.metrics["val/ndcg10"] == 0.125
    assert [(one.step, one.value) for one in client.get_metric_history(logger.run_id, "train/loss")][:2] == [
        (10, 0.5),
        (20, 0.25),
    ]
    again = open_mlflow(uri, experiment="wellfed", name="first", run_id=logger.run_id)
    sink_of(again, is_new=False)[0].finish({}, 0)
    assert client.get_run(logger.run_id).info.status == "FINISHED"
    assert len(client.get_metric_history(logger.run_id, "train/loss")) == 5
