"""A budget of memory is kept on a card that has no more, and on a much larger one."""

from pathlib import Path

import pytest

from tests.end_to_end.commands import record_of, run, run_folders
from tests.fake_cuda.machine import FakeCuda

DEEP = """
import torch
from torch import nn
from wellfed.contract import Datasets, LossOutput

WIDTH, DEPTH = 16384, 32


class Data:
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        return {"x": torch.linspace(-1, 1, WIDTH)}


class Model(nn.Module):
    '''One activation a layer is kept for the backward pass: 2 MiB a sample.'''

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(DEPTH))

    def loss(self, batch):
        x = batch["x"]
        for scale in self.scales:
            x = torch.relu(x * scale)
        return LossOutput(x.mean())


def data():
    return Datasets(Data(), None, None)
"""
STEPS = ("trainer.max_steps=2", "logger=none", "telemetry=none", "telemetry.ceiling_steps=0", "loader.backend=inline")


@pytest.mark.slow
def test_a_budget_is_kept_and_used_on_a_small_card_and_a_large_one(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """On both by the same micro-batch, without running out."""
    (tmp_path / "deep.py").write_text(DEEP)
    workloads = tmp_path / "configs" / "workload"
    workloads.mkdir(parents=True)
    (workloads / "deep.yaml").write_text(
        "name: deep\neffective_batch_size: 1024\nmodel: {_target_: deep.Model}\ndata: {_target_: deep.data}\n"
        "optimizer: {_target_: torch.optim.SGD, lr: 0.01}\n"
    )
    named = ("--config-dir", str(tmp_path / "configs"), "workload=deep")
    planned = set()
    for mib in (2 * 1024, 80 * 1024):
        card = fake_cuda.environment(mib=mib)
        card["PYTHONPATH"] += f":{tmp_path}"
        done = run("train.py", *named, *STEPS, "gpu=8gb", "gpu.memory_gib=1.2", cwd=tmp_path, **card)
        assert done.code == 0, done.text
        record = record_of(run_folders(tmp_path, "deep")[-1])
        planned.add(record["plan"]["memory.micro_batch"]["value"])
        assert {event["kind"] for event in record["events"]} & {"oom", "ladder"} == set()
        assert 0.85 * 1.2 < record["memory"]["measured_peak_gib"] <= 1.2
    assert len(planned) == 1
