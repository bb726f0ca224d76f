"""What a run says of its ceiling: on a machine that was slower meanwhile, where it fails, and on a card."""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import Done, only_folder, record_of, run
from tests.fake_cuda.machine import FakeCuda

MODULE = """
import os
import time
import torch
from torch import nn
from wellfed.contract import Datasets, LossOutput


class Model(nn.Module):
    def __init__(self, slow_steps=0):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.slow_steps, self.steps = slow_steps, 0

    def loss(self, batch):
        self.steps += self.training
        if self.steps <= self.slow_steps:
            time.sleep(0.03)
        return LossOutput(self.layers(batch["x"]).square().mean())


class Data:
    def __init__(self, fetch_s, good):
        self.fetch_s, self.good, self.fetched = fetch_s, good, 0

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        return {"x": torch.full((8,), i / 1000)}

    def fetch(self, indices, rng):
        time.sleep(self.fetch_s)
        self.fetched += 1
        if self.fetched > self.good and os.environ.get("LOCAL_RANK") == "1":
            raise OSError("the disk is gone")
        return {"x": (indices / 1000)[:, None].expand(-1, 8).contiguous()}


def data(fetch_s=0.0, good=10**9):
    return Datasets(Data(fetch_s, good))
"""
YAML = """
name: mine
effective_batch_size: 32
model: {_target_: mine.Model}
data: {_target_: mine.data}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    folder = tmp_path / "configs" / "workload"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(YAML)
    return tmp_path


def trained(mine: Path, *arguments: str, steps: int = 63, **machine: str) -> tuple[Done, dict[str, Any], str]:
    """Command, record and report of a run that ended well; 31 whole steps and one of 8 are an epoch."""
    paths = [str(mine), machine.pop("PYTHONPATH", "")]
    done = run(
        "train.py",
        *["--config-dir", str(mine / "configs"), "workload=mine", "logger=none"],
        *["loader.backend=inline", f"trainer.max_steps={steps}", *arguments],
        cwd=mine,
        PYTHONPATH=":".join(filter(None, paths)),
        **machine,
    )
    assert done.code == 0, done.text
    assert "Traceback" not in done.text
    folder = only_folder(mine, "mine")
    record = record_of(folder)
    assert record["status"] == "ok"
    return done, record, (folder / "report.md").read_text()


@pytest.mark.slow
def test_a_machine_that_was_slower_while_training_is_no_gain_that_is_promised(mine: Path) -> None:
    done, record, report = trained(mine, "+workload.model.slow_steps=63")
    assert record["ceiling"]["samples_per_s"] > 3 * record["throughput"]["samples_per_s"]
    assert record["time"]["wait_frac"] < 0.3
    assert {"busy_machine", "machine_was_slower"} & {finding["id"] for finding in record["findings"]}
    assert "(doubtful)" in report
    assert "(doubtful)" in done.out
    (told,) = [event for event in record["events"] if event["kind"] == "ceiling_doubtful"]
    assert told["slower"] == "steps"
    assert "Ceiling doubtful" not in done.out  # said where the ceiling stands


@pytest.mark.slow  # tests/train/loop/test_ceiling.py and tests/run/passes/test_passes.py hold the parts of it
@pytest.mark.parametrize("steps", [63, 64])
def test_on_a_card_that_lags_behind_the_ceiling_is_the_rate_wherever_training_ended(
    mine: Path, fake_cuda: FakeCuda, steps: int
) -> None:
    card = fake_cuda.environment(cards=1, mib=8192, kernel_us=300)
    _, record, _ = trained(mine, steps=steps, **card)
    assert record["machine"]["gpus"][0]["is_simulated"]
    assert record["ceiling"]["samples_per_s"] == pytest.approx(record["throughput"]["samples_per_s"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("good", [10**9, 63])
def test_two_ranks_have_one_ceiling_or_none(mine: Path, good: int) -> None:
    """Where one can't load its batches any more, the other does not wait for it."""
    ranks = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu"]
    _, record, _ = trained(mine, f"+workload.data.good={good}", *ranks)
    assert (record["ceiling"] is None) == (good == 63)
