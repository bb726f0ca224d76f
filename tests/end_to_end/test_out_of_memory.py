"""A simulated card that runs out of memory, at every stage of a run: it goes on, or ends with message, record and code.

The card's memory is taken away by a model and a data set that hold more of it from a step on.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run

from tests.end_to_end.commands import ROOT, Done, run
from tests.fake_cuda.machine import FakeCuda

WORKLOAD = '''
import os
import lightning.pytorch as pl
import torch
from torch import nn
from wellfed.contract import Datasets, LossOutput

MIB = 2**18  # numbers of four bytes

def full(device):
    return torch.empty(8192 * MIB, device=device)

class Data:
    def __init__(self, length): self.length = length
    def __len__(self): return self.length
    def __getitem__(self, index): return self.fetch(torch.tensor([index]), None)
    def fetch(self, indices, rng): return {"x": torch.ones(len(indices), 4) * indices.unsqueeze(1) / 64}

def data(): return Datasets(Data(64), Data(16), Data(16))

class Model(nn.Module):
    """Needs a mebibyte a sample for its activations; ``stage`` says where it needs more than any card has."""
    def __init__(self, stage="", at=5, weights_mib=1):
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.large = nn.Parameter(torch.zeros(weights_mib * MIB))
        self.stage, self.at, self.calls, self.kept = stage, at, 0, []
        Optimizer.failures = 1000 if stage == "no state" else 0
        Optimizer.fails_at = at if stage == "optimizer" else 1000
    def _apply(self, move, recurse=True):
        found = super()._apply(move, recurse)
        if self.stage == "build" and self.large.is_cuda: full(self.large.device)
        return found
    def state_dict(self, *arguments, **named):
        if self.stage == "checkpoint" and self.calls >= self.at: full(self.large.device)
        return super().state_dict(*arguments, **named)
    def loss(self, batch):
        x = batch["x"]
        self.calls += self.training
        if self.stage == "validation" and not self.training and x.is_cuda: full(x.device)
        on_card = x.is_cuda and self.training  # what is rehearsed before training sees nothing of it
        if self.stage == "first batch" and on_card: full(x.device)
        if self.stage == "rank 1" and on_card and os.environ.get("LOCAL_RANK") == "1" and self.calls >= self.at:
            full(x.device)
        if self.stage == "ceiling" and on_card and os.environ.get("LOCAL_RANK") == "1" and self.calls > 8:
            raise KeyError("a bug")
        if self.stage == "keeps" and on_card: self.kept.append(torch.empty(len(x) * 2 * MIB, device=x.device))
        # More in each pass than in the one before: no block of the cache is large enough for it.
        if self.stage == "growing" and on_card: torch.empty(len(x) * (8 * MIB + self.calls * MIB // 8), device=x.device)
        # From a step on that comes after those that are tried before training.
        if self.stage == "later" and on_card and self.calls >= self.at: torch.empty(len(x) * 32 * MIB, device=x.device)
        if self.stage == "forward" and on_card: torch.empty(len(x) * 32 * MIB, device=x.device)
        activations = (self.net(x) * torch.ones(1, MIB, device=x.device)).relu()
        loss = activations.mean() + 0 * self.large.sum()
        if self.stage == "backward" and on_card and self.calls >= self.at:
            loss = Fails.apply(loss)
        return LossOutput(loss)

class Guest(pl.LightningModule):
    def __init__(self, **arguments):
        super().__init__()
        self.model = Model(**arguments)
    def training_step(self, batch, batch_idx): return self.model.loss(batch).loss
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.01)

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x): return x.clone()
    @staticmethod
    def backward(context, gradient): return full(gradient.device)

class Optimizer(torch.optim.AdamW):
    failures = 0
    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if Optimizer.failures and weights[0].is_cuda and max(map(torch.numel, weights)) > MIB // 2:  # no small copy
            Optimizer.failures -= 1
            full("cuda")
        loss = super().step(closure)
        # Adam's own count, since steps that try the loader are other optimizers'.
        if weights[0].is_cuda and self.state[weights[0]]["step"] >= Optimizer.fails_at: full("cuda")
        return loss
'''

OPTION = """
name: hungry
model: {_target_: hungry.work.Model, stage: "", at: 5, weights_mib: 1}
data: {_target_: hungry.work.data}
optimizer: {_target_: hungry.work.Optimizer, lr: 0.01}
effective_batch_size: 16
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "hungry"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "work.py").write_text(WORKLOAD, encoding="utf-8")
    option = tmp_path / "configs" / "workload" / "hungry.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(OPTION, encoding="utf-8")
    return tmp_path


def hungry(
    project: Path,
    fake_cuda: FakeCuda,
    *overrides: str,
    command: tuple[str, ...] = ("train.py",),
    cwd: Path | None = None,
    **cards: Any,
) -> tuple[Done, dict[str, Any]]:
    environment = fake_cuda.environment(**{"cards": 1, "mib": 1024, **cards})
    environment["PYTHONPATH"] = f"{project / 'src'}:{environment['PYTHONPATH']}"
    done = run(
        *command,
        "--config-dir",
        str(project / "configs"),
        "workload=hungry",
        "trainer.max_epochs=null",
        "trainer.max_steps=8",
        "memory.micro_batch=16",
        "telemetry.ceiling_steps=0",
        "logger=none",
        *overrides,
        cwd=cwd or project,
        **environment,
    )
    records = sorted((cwd or project).glob("logs/*/runs/*/run.json"))
    return done, json.loads(records[-1].read_text(encoding="utf-8")) if records else {}


STAGES = {
    "build": "Out of memory",
    "first batch": "micro-batches of 16 -> 8 -> 4 -> 2 -> 1",
    "backward": "micro-batches of 16 -> 8 -> 4 -> 2 -> 1",
    "no state": "in the optimizer's step 1,",
    "optimizer": "in the optimizer's step 5,",
    "validation": "in the val split with 1 sample",
    "checkpoint": "out of memory",
}


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage == "backward" else pytest.mark.slow) for stage in STAGES]
)
def test_a_card_without_any_room_ends_a_run_with_its_record(project: Path, fake_cuda: FakeCuda, stage: str) -> None:
    done, record = hungry(project, fake_cuda, f"workload.model.stage='{stage}'")
    assert done.code == 3, done.text[-3000:]
    assert STAGES[stage].lower() in done.err.lower()
    assert "Traceback" not in done.err
    assert record["status"] == "oom"
    assert record["exit_code"] == 3
    assert record["error"]["kind"] == "device_oom"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [(), ("workload.model._target_=hungry.work.Guest", "workload.optimizer=null", "memory.micro_batch=null")]
)
def test_a_model_that_keeps_tensors_of_past_steps_is_not_given_smaller_steps(
    project: Path, fake_cuda: FakeCuda, kind: tuple[str, ...]
) -> None:
    done, record = hungry(project, fake_cuda, "workload.model.stage=keeps", "trainer.max_steps=100", *kind)
    assert done.code == 3, done.text[-3000:]
    assert record["error"]["message"].startswith("Memory grew with every step, by 32 MiB a step over ")
    assert {"oom", "step_down", "restart"} & {event["kind"] for event in record["events"]} == {"oom"}


@pytest.mark.slow
def test_a_card_with_room_for_a_few_samples_trains_on(project: Path, fake_cuda: FakeCuda) -> None:
    overrides = ("workload.model.stage=forward", "loader.device_prefetch=2")
    done, record = hungry(project, fake_cuda, *overrides, mib=256)
    assert done.code == 0, done.text[-3000:]
    assert "step_down" in {event["kind"] for event in record["events"]}
    assert record["steps"] == 8
    assert record["samples"] == 8 * 16


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["backward", "rank 1", "validation"])
@pytest.mark.parametrize("on_oom", ["retry", "fail"])
def test_ranks_end_together(project: Path, fake_cuda: FakeCuda, on_oom: str, stage: str) -> None:
    ddp = ("trainer=ddp", "trainer.devices=2", "workload.effective_batch_size=32")
    done, record = hungry(
        project, fake_cuda, *ddp, f"workload.model.stage='{stage}'", f"memory.on_oom={on_oom}", cards=2
    )
    assert done.code == 3, done.text[-3000:]
    assert record["status"] == "oom"
    assert "out of memory" in done.err.lower()
    assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("on_oom", ["retry", "fail"])
def test_ranks_that_torchrun_starts_have_the_record_of_the_one_that_failed(
    project: Path, fake_cuda: FakeCuda, on_oom: str
) -> None:
    torchrun = (torch.distributed.run.__file__, "--nproc-per-node=2", str(ROOT / "src" / "train.py"))
    ddp = ("trainer=ddp", "trainer.devices=2", "workload.effective_batch_size=32")
    stage = ("workload.model.stage='rank 1'", f"memory.on_oom={on_oom}")
    done, record = hungry(project, fake_cuda, *ddp, *stage, cards=2, command=torchrun)
    assert done.code == 1  # torchrun's own
    assert (record["status"], record["exit_code"], record["error"]["kind"]) == ("oom", 3, "device_oom")
    assert "Tried to allocate" in record["error"]["message"], "the reason of the rank whose memory it was"
    told = done.err.partition("torch/distributed/run.py")[0]  # then it tells of itself
    assert told.count("Out of memory on rank 1 with micro-batches of 16") == 1
    if on_oom == "retry":
        assert "Start it again with memory.micro_batch=8." in record["error"]["message"]
    assert "Connection closed" not in told


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_told_by_its_parts_and_leaves_no_run(project: Path, fake_cuda: FakeCuda) -> None:
    words = ("memory.micro_batch=null", "gpu.memory_gib=0.056", "workload.model.weights_mib=14")
    done, record = hungry(project, fake_cuda, *words)
    assert (done.code, record) == (3, {}), done.text[-3000:]
    assert done.err.count("Memory does not suffice; nothing was run.") == 1
    assert "one sample at a time needs" in done.err
    assert "optimizer state 28.0 MiB" in done.err
    assert "Take a larger card (gpu.memory_gib=" in done.err
    assert "Traceback" not in done.err
    assert not [*project.glob("logs/*/runs/*")]
    done, record = hungry(project, fake_cuda, "gpu.memory_gib=0.056", "workload.model.weights_mib=64")
    assert (done.code, record) == (3, {})
    assert "Memory does not suffice; nothing was run." in done.err
