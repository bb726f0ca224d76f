"""A LightningModule that draws into its logger, with each logger that can be chosen."""

from pathlib import Path

import pytest

from tests.end_to_end.commands import Done, only_folder, record_of, run
from tests.kit.wandb_files import stored

YAML = """
name: drawing
effective_batch_size: 16
model:
  _target_: drawing.Drawing
data:
  _target_: drawing.data
"""
MODULE = """
import lightning.pytorch as pl
import torch
from wellfed.contract import Datasets

class Drawing(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 4, "seed": 99})
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        self.log("g", 2.0)
        if isinstance(self.logger, pl.loggers.TensorBoardLogger):
            self.logger.experiment.add_scalar("mine/scalar", 3.0, self.global_step)
        self.logger.log_metrics({"own": 4.0}, step=self.global_step)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch).square().mean())

    def on_train_start(self):
        kinds = [[it for it in type(one).__mro__ if it.__module__.startswith("lightning")] for one in self.loggers]
        print("LOGGERS", [kind[0].__name__ for kind in kinds], flush=True)

    def configure_callbacks(self):
        return [pl.callbacks.LearningRateMonitor("step")]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def data():
    return Datasets(torch.randn(64, 4), torch.randn(16, 4), torch.randn(16, 4))
"""


def drawn(folder: Path, *arguments: str, **more: str) -> Done:
    (folder / "configs" / "workload").mkdir(parents=True, exist_ok=True)
    (folder / "configs" / "workload" / "drawing.yaml").write_text(YAML)
    (folder / "drawing.py").write_text(MODULE)
    where = ("--config-dir", str(folder / "configs"), "workload=drawing")
    quick = ("trainer.max_epochs=2", "trainer.log_every_steps=2", "telemetry.ceiling_steps=3", "loader.backend=inline")
    done = run("train.py", *where, *quick, *arguments, cwd=folder, PYTHONPATH=str(folder), **more)
    assert done.code == 0, done.text
    return done


@pytest.mark.slow
def test_wandb_gets_every_figure(tmp_path: Path) -> None:
    done = drawn(tmp_path, "logger=[wandb,csv]")
    assert "LOGGERS ['WandbLogger', 'CSVLogger']" in done.out
    record = record_of(only_folder(tmp_path, "drawing"))
    found = stored(tmp_path / record["wandb"]["path"])
    for name in (
        "train/g",
        "train/own",
        "step/wait_ms",
        "step/compute_ms",
        "step/host_ms",
        "throughput/readiness_frac",
    ):
        assert found.curve("step", name), name
    assert [value for _, value in found.curve("step", "val/loss")][-1] == pytest.approx(record["metrics"]["val/loss"])
    summary = {name: value for entry in found.of_type("summary") for name, value in entry["update"].items()}
    assert summary["ceiling/samples_per_s"] == pytest.approx(record["ceiling"]["samples_per_s"])
    (config,) = [entry["config"]["update"] for entry in found.of_type("run")][:1]
    assert config["loader"]["num_workers"] == 0
    assert config["trainer"]["accelerator"] == record["plan"]["trainer.accelerator"]["value"]


@pytest.mark.guests
def test_tensorboard_and_mlflow_get_the_same_and_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = drawn(tmp_path, "logger=[tensorboard,mlflow]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert "LOGGERS ['TensorBoardLogger', 'MLFlowLogger']" in done.out
    folder = only_folder(tmp_path, "drawing")
    record = record_of(folder)
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    assert len(found.Scalars("mine/scalar")) == 8
    run = MlflowClient(record["mlflow"]["uri"]).get_run(record["mlflow"]["run_id"])
    assert (run.info.run_name, run.info.status) == (folder.name, "FINISHED")
    names = {"train/loss", "train/g", "train/own", "train/lr", "val/loss", "test/loss", "ceiling/samples_per_s"}
    names |= {"step/wait_ms", "step/compute_ms", "step/host_ms", "throughput/samples_per_s", "host/rss_gib"}
    assert names <= set(found.Tags()["scalars"])
    assert names <= set(run.data.metrics)
    for name in ("train/loss", "val/loss", "test/loss"):
        assert found.Scalars(name)[-1].value == pytest.approx(record["metrics"][name], rel=1e-5)
        assert run.data.metrics[name] == pytest.approx(record["metrics"][name], rel=1e-5)
    assert run.data.params["loader/num_workers"] == "0"
    kept = Path(run.info.artifact_uri.removeprefix("file:"))
    (told,) = found.Tensors("findings/text_summary")
    text = told.tensor_proto.string_val[0].decode()
    assert text == (kept / "findings.md").read_text()
    assert [one["id"] in text for one in record["findings"]] == [True] * len(record["findings"])
