"""``wellfed watch`` on scripts that lose time outside of their passes: what is found, and what is typed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.run.watch.test_watched_script import WATCH, ended, findings_of, record_of
from wellfed.record.entries import RunRecord

LOOP = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        time.sleep(0.01)
        return self.layer(x)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn({samples}, 4))
def validate():
    with torch.no_grad():
        for (x,) in DataLoader(data, batch_size=20):
            model(x)
{more}
loader = DataLoader(data, batch_size=4)
for epoch in range({epochs}):
    for number, (x,) in enumerate(loader):
        {in_step}
    {after_epoch}
"""
STEP = "model(x).mean().backward(); {}; optimizer.step(); optimizer.zero_grad()"
CLOSURE = """
        def closure():
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            time.sleep(0.02)
            return loss
        optimizer.step(closure)"""


def watched(folder: Path, card: Mapping[str, str] | None = None, **parts: Any) -> RunRecord:
    defaults = {"more": "", "after_epoch": "pass", "epochs": 1, "samples": 160}
    (folder / "train.py").write_text(LOOP.format(**{**defaults, **parts}))
    done = ended(*WATCH, "train.py", cwd=folder, **(card or {}))
    assert done.returncode == 0, done.stderr
    return record_of(folder)


def test_validations_within_an_epoch_are_told_by_their_steps(tmp_path: Path) -> None:
    record = watched(tmp_path, in_step=STEP.format("pass") + "\n        if number % 5 == 4: validate()")
    (finding,) = [one for one in record.findings if one["id"] == "frequent_validation"]
    assert "one every 5 steps" in finding["text"]
    assert finding["change"][0].startswith("validation every ")


OTHER = """
class Other(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    def forward(self, x):
        time.sleep(0.03)
        return self.layers(x)
other = Other().requires_grad_(False)
"""
AVERAGE = """
import copy
other = copy.deepcopy(model)
other.forward = lambda x: (time.sleep(0.03), x)[1]
"""


@pytest.mark.parametrize(
    ("more", "in_step"),
    [
        (OTHER, STEP.format("pass").replace("model(x)", "other(x); y = model(x); y")),
        (OTHER, STEP.format("pass").replace("model(x)", "y = model(x); y = y + other(x).mean(); y")),
        pytest.param(AVERAGE, "with torch.no_grad(): other(x)\n        " + STEP.format("pass"), marks=pytest.mark.slow),
        pytest.param(
            OTHER,
            "y = model(x)\n        with torch.no_grad(): other(x)\n        y.mean().backward(); optimizer.step()",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["frozen encoder", "loss by a frozen model", "average of the weights", "teacher"],
)
def test_a_second_model_is_no_pause(more: str, in_step: str, tmp_path: Path) -> None:
    """Its passes are part of the forward pass, though no optimizer has its parameters."""
    record = watched(tmp_path, more=more, in_step=in_step)
    assert "slow_callbacks" not in findings_of(record)
    assert record.time is not None
    assert record.time["forward_frac"] is not None
    assert record.time["forward_frac"] > 0.6


@pytest.mark.parametrize("after_epoch", ["pass", pytest.param("validate()", marks=pytest.mark.slow)])
def test_what_a_script_does_after_its_training_is_none_of_it(after_epoch: str, tmp_path: Path) -> None:
    record = watched(tmp_path, in_step=STEP.format("pass"), after_epoch=f"{after_epoch}\ntime.sleep(3)")
    assert sum(spent["total_s"] for phase, spent in record.phases.items() if phase != "start") < record.duration_s - 3
    (run,) = (tmp_path / "logs" / "watch" / "runs").iterdir()
    last = (run / "telemetry.csv").read_text().splitlines()[-1]
    assert float(last.split(",")[0]) < record.duration_s - 2


def test_files_saved_one_after_another_are_one_checkpoint(tmp_path: Path) -> None:
    """As transformers writes a model, its optimizer, the schedule and the state of random numbers."""
    save = "\n        if number % 5 == 4:\n            for file in 'abc': torch.save(model.state_dict(), file)"
    record = watched(tmp_path, in_step=STEP.format("pass") + save)
    assert record.phases["checkpoint"]["times"] == 8
    assert [event["kind"] for event in record.events].count("checkpoint") == 8
    assert record.plan["trainer.checkpoint_every_steps"]["value"] == 5


def test_arguments_of_an_optimizer_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import torch
class Own(torch.optim.SGD):
    def step(self, model, closure=None):
        print(type(model).__name__, getattr(closure, "__name__", ""), getattr(closure, "tries", 0))
        closure()
        return super().step()
class Loss:
    tries = 3
    def __call__(self):
        optimizer.zero_grad()
        return model(torch.ones(2, 4)).mean().backward()
def named():
    return Loss()()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = Own(model.parameters(), lr=0.1)
for closure in (Loss(), named, Loss().__call__, Loss()):
    optimizer.step(model, closure)
    optimizer.step(model, closure=closure)
print(model.bias.tolist())
"""
    )
    alone, done = ended("train.py", cwd=tmp_path), ended(*WATCH, "train.py", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert "Linear named 0" in alone.stdout
    assert (done.returncode, done.stdout) == (0, alone.stdout), done.stderr
