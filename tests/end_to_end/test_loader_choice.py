"""``loader.backend=auto`` on data of several kinds, as the user of the command meets it."""

from pathlib import Path

import pytest

from tests.end_to_end.commands import only_folder, record_of, run

MODULE = """
import time

import torch
from torch import nn
from wellfed.contract import Datasets, LossOutput


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def loss(self, batch):
        return LossOutput(self.net(batch["x"][:, :8]).square().mean())


class Items:
    def __init__(self, ms=0.0, bad=None):
        self.ms, self.bad = ms, bad
        self.x = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if self.bad is not None:
            raise KeyError("broken")
        time.sleep(self.ms / 1000)
        return {"x": self.x[i]}


class Batches(Items):
    def fetch(self, indices, rng):
        time.sleep(self.ms / 1000)
        return {"x": self.x.index_select(0, indices)}


def items(ms=0.0, bad=None):
    return Datasets(Items(ms, bad))


def batches(ms=0.0):
    return Datasets(Batches(ms))
"""
YAML = """
name: {name}
effective_batch_size: 16
model:
  _target_: mine.Net
data:
  _target_: mine.{name}
optimizer: {{_target_: torch.optim.SGD, lr: 0.01}}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    folder = tmp_path / "configs" / "workload"
    folder.mkdir(parents=True)
    for name in ("items", "batches"):
        (folder / f"{name}.yaml").write_text(YAML.format(name=name))
    return tmp_path


def own(mine: Path, workload: str, *arguments: str):
    fixed = ("trainer.max_epochs=1", "logger=none", "telemetry=none")
    where = ("--config-dir", str(mine / "configs"), f"workload={workload}")
    return run("train.py", *where, *fixed, *arguments, cwd=mine, PYTHONPATH=str(mine))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "ms", "backends"),  # a machine under load may show a tie
    [("batches", 20, {"inline", "threads", "processes"}), ("items", 2, {"inline", "processes"})],
)
def test_auto_takes_what_the_first_batches_show(mine: Path, workload: str, ms: int, backends: set[str]) -> None:
    done = own(mine, workload, f"+workload.data.ms={ms}")
    assert done.code == 0, done.text
    record = record_of(only_folder(mine, workload))
    chosen = record["plan"]["loader.backend"]
    assert (record["steps"], record["samples"]) == (10, 160)
    assert chosen["value"] in backends, chosen
    assert chosen["source"] == "measured"
    if "trial" in chosen["because"]:  # under load a step and its batch may take too long for one
        assert chosen["because"].count(" ms") == len(backends)


@pytest.mark.slow
def test_a_sample_that_fails_is_told_by_training_not_by_the_trial(mine: Path) -> None:
    done = own(mine, "items", "+workload.data.bad=3")
    assert done.code == 1, done.text
    record = record_of(only_folder(mine, "items"))
    assert "broken" in record["error"]["message"]
    assert "could not be loaded" in record["error"]["message"]
    assert record["plan"]["loader.backend"]["source"] == "predicted"
