"""Datasets and models as people write them, as the user of the command meets them."""

from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import Done, only_folder, record_of, train_own

MODULE = """
import time

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from wellfed import LossOutput


class Table(Dataset):
    def __init__(self, rows):
        self.x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
        self.rng, self.num_asked = np.random.default_rng(7), 0

    def __len__(self):
        return len(self.x)


class Noisy(Table):
    def __getitem__(self, index):
        return self.x[index] + torch.from_numpy(self.rng.normal(size=6)).float()


class Whole(Table):
    def __getitems__(self, indices):
        time.sleep(0.002)
        return [self.x[index] for index in indices]


class Level(Table):
    level = 0

    def __getitem__(self, index):
        return torch.tensor(float(self.level))


class Curriculum(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.dataset.level = self.current_epoch

    def training_step(self, levels, batch_idx):
        self.log("level", levels.mean(), on_step=False, on_epoch=True)
        return self.weight * levels.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def datasets(kind, rows=96):
    kinds = {"noisy": Noisy, "whole": Whole, "level": Level}
    return kinds[kind](rows), Whole(32), Whole(32)


class Forces(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.SiLU(), nn.Linear(8, 1))

    def loss(self, x):
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_(True)
            energy = self.net(x).squeeze(-1)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        error = (slope + 2 * x).square().mean()
        return LossOutput(error + (energy - x.square().sum(1)).square().mean(), metrics={"force_mse": error.detach()})
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "forces.py").write_text(MODULE)
    folder = tmp_path / "configs" / "workload"
    folder.mkdir(parents=True)
    (folder / "forces.yaml").write_text(
        "name: forces\neffective_batch_size: 32\nmodel: {_target_: forces.Forces}\n"
        "data: {_target_: forces.datasets, kind: noisy}\noptimizer: {_target_: torch.optim.SGD, lr: 0.01}\n"
    )
    return tmp_path


def train(user: Path, *arguments: str, **more: str) -> Done:
    return train_own(user, "forces", "trainer.max_epochs=2", "telemetry=none", *arguments, **more)


@pytest.mark.slow
def test_any_number_of_workers_learns_the_same_and_evaluation_allows_gradients(user: Path) -> None:
    weights = []
    for workers in (0, 1, 3):
        cwd = user / f"{workers}"
        cwd.mkdir()
        backend = "processes" if workers else "inline"
        done = train(user, f"loader.backend={backend}", f"loader.num_workers={workers}", cwd=cwd)
        assert done.code == 0, done.text
        folder = only_folder(cwd, "forces")
        assert {"val/force_mse", "test/force_mse"} <= set(record_of(folder)["metrics"])
        weights.append(torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    for name, value in weights[0].items():
        assert all(torch.equal(value, other[name]) for other in weights[1:]), name


@pytest.mark.slow
def test_what_a_hook_changes_reaches_workers(user: Path) -> None:
    own = ("workload.model._target_=forces.Curriculum", "workload.optimizer=null", "workload.data.kind=level")
    done = train(user, *own, "trainer.max_epochs=3", "loader.backend=processes", "loader.num_workers=2")
    assert done.code == 0, done.text
    rows = (only_folder(user, "forces") / "metrics.csv").read_text().splitlines()
    assert [float(row.rpartition(",")[2]) for row in rows if ",train,level," in row] == [0, 1, 2]


@pytest.mark.slow
def test_a_last_batch_of_one_sample_is_warned_of_and_named_where_it_fails(user: Path) -> None:
    norm = ("+workload.model.norm=true", "workload.data.kind=whole", "+workload.data.rows=65")
    done = train(user, *norm)
    assert done.code == 1
    assert "The last batch of each epoch has 1 sample: BatchNorm has no statistics" in done.text
    assert "It failed in the layer net.1, a BatchNorm1d." in done.err
    assert "workload.drop_last=true leaves out a last batch of one" in done.err
    done = train(user, *norm, "workload.drop_last=true")
    assert done.code == 0, done.text
