"""Loading the model of a run folder, with the weights of its checkpoint."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from wellfed.contract import Datasets
from wellfed.errors import ConfigError, DataError
from wellfed.record.entries import RunRecord
from wellfed.run.objects.load_model import load_model


def data() -> Datasets:
    return Datasets(train=[], model_args={"width": 3})


def wide(width: int | None) -> Datasets:
    return Datasets(train=[], model_args={"width": width or 2})


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(width, 1), nn.Dropout())


class Guest(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass


def run_of(folder: Path, model: nn.Module, prefix: str, target: str, data_target: str = "data") -> Path:
    nodes = {"model": {"_target_": f"{__name__}.{target}"}, "data": {"_target_": f"{__name__}.{data_target}"}}
    record = RunRecord.start("a")
    record.config = {"workload": nodes}
    (folder / "checkpoints").mkdir(parents=True)
    record.write(folder)
    for name, scale in (("last.ckpt", 1), ("best.ckpt", 2)):
        weights = {f"{prefix}{key}": value * scale for key, value in model.state_dict().items()}
        torch.save({"state_dict": weights}, folder / "checkpoints" / name)
    return folder


def test_a_run_is_named_as_for_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "logs" / "w" / "runs" / "2026-01-01_00-00-00_aaaa", Net(3), "model.", "Net")
    newer = run_of(tmp_path / "logs" / "w" / "runs" / "2026-02-01_00-00-00_bbbb", Net(3), "model.", "Net")
    (newer / "checkpoints" / "best.ckpt").unlink()
    last = torch.load(newer / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]["model.model.0.weight"]
    for name in ("last", "2026-02"):
        assert torch.equal(load_model(name).model[0].weight, last)
        assert "2026-02-01_00-00-00_bbbb" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="2026: may be any of 2 folders"):
        load_model("2026")


def test_a_plain_model(tmp_path: Path) -> None:
    trained = Net(3)
    folder = run_of(tmp_path, trained, "model.", "Net")
    found = load_model(folder)
    assert not found.training
    assert torch.equal(found.model[0].weight, 2 * trained.model[0].weight)
    last = load_model(folder / "checkpoints" / "last.ckpt")
    assert torch.equal(last.model[0].weight, trained.model[0].weight)


def test_values_that_followed_from_the_data_are_those_of_the_run(tmp_path: Path) -> None:
    folder = run_of(tmp_path, Net(5), "model.", "Net", "wide")
    record = RunRecord.read(folder)
    record.config["workload"]["data"]["width"] = None
    record.plan = {"workload.data.width": {"value": 5, "because": "5 columns", "source": "data"}}
    record.write(folder)
    assert load_model(folder).model[0].in_features == 5


def test_a_lightning_module(tmp_path: Path) -> None:
    trained = Guest()
    assert torch.equal(load_model(run_of(tmp_path, trained, "", "Guest"), {}).net.bias, 2 * trained.net.bias)


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run in logs yet"):
        load_model(tmp_path)
    folder = run_of(tmp_path / "a", Net(3), "model.", "Net")
    with pytest.raises(DataError, match=r"(?s)best.ckpt does not fit the model that run.json names.*size mismatch"):
        load_model(folder, {"width": 4})
    (folder / "run.json").unlink()
    with pytest.raises(DataError, match=r"no run record beside it"):
        load_model(folder / "checkpoints" / "best.ckpt")
