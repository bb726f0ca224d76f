"""``wellfed watch`` on scripts that lose time outside of their passes: what is found, and what is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.watch.test_watched_script import WATCH, ended, findings_of, record_of

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


def watched(folder: Path, *, in_step: str, after_epoch: str = "pass", epochs: int = 1, samples: int = 160):
    text = LOOP.format(in_step=in_step, after_epoch=after_epoch, epochs=epochs, samples=samples)
    (folder / "train.py").write_text(text)
    done = ended(*WATCH, "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return record_of(folder)


@pytest.mark.parametrize(
    "in_step",
    [STEP.format("time.sleep(0.02)"), pytest.param(CLOSURE, marks=pytest.mark.slow)],
    ids=["loop", "closure"],
)
def test_work_between_backward_and_optimizer_is_found(in_step: str, tmp_path: Path) -> None:
    record = watched(tmp_path, in_step=in_step)
    (finding,) = [one for one in record.findings if one["id"] == "slow_callbacks"]
    assert "between forward pass, backward pass and optimizer" in finding["text"]
    assert record.time is not None
    assert record.time["optimizer_frac"] < 0.3


@pytest.mark.slow
def test_work_between_epochs_is_found(tmp_path: Path) -> None:
    record = watched(tmp_path, in_step=STEP.format("pass"), after_epoch="time.sleep(0.3)", epochs=6, samples=40)
    (finding,) = [one for one in record.findings if one["id"] == "slow_callbacks"]
    assert "of training passed between epochs: 3" in finding["text"]


def test_validations_within_an_epoch_are_told_by_their_steps(tmp_path: Path) -> None:
    record = watched(tmp_path, in_step=STEP.format("pass") + "\n        if number % 5 == 4: validate()")
    (finding,) = [one for one in record.findings if one["id"] == "frequent_validation"]
    assert "one every 5 steps" in finding["text"]
    assert finding["change"][0].startswith("validation every ")


@pytest.mark.slow
def test_a_loop_that_computes_is_accused_of_nothing(tmp_path: Path) -> None:
    record = watched(tmp_path, in_step=STEP.format("pass"))
    assert findings_of(record) in ([], ["unknown"])
    if findings_of(record):
        assert "the passes take: forward" in record.findings[0]["text"]
