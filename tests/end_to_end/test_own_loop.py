"""The code of docs/your_own_loop.md in scripts that know nothing else of wellfed: with a simulated card and without."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.end_to_end.commands import Done, run
from tests.every.test_readme import ROOT, blocks
from tests.fake_cuda.machine import Cards, machine_environment
from tests.fake_nvml.driver import FakeDriver

PAGE = (ROOT / "docs" / "your_own_loop.md").read_text(encoding="utf-8")
LOOP, TRAINER = (block.text for block in blocks(PAGE) if block.language == "python")
DATA = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 320
    def __getitem__(self, index):
        time.sleep(0.003)  # so long that a card is read often enough
        return torch.randn(256), torch.randn(1)

loader = DataLoader(Data(), batch_size=8)
"""
PLAIN = (
    DATA
    + """
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

def train_step(x, y):
    loss = (net(x.to(device)) - y.to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
LIGHTNING = (
    """
import {library} as pl
"""
    + DATA.replace("{", "{{").replace("}", "}}")
    + """
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) - y).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

model = Model()
"""
)


@pytest.fixture(params=["a card", "no card"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Mapping[str, str]:
    """Variables of a machine with a simulated card, and of one without NVML."""
    if request.param == "no card":
        return {"LD_LIBRARY_PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    request.getfixturevalue("fake_cuda")
    driver: FakeDriver = request.getfixturevalue("fake_driver")
    (tmp_path / "machine").mkdir()
    return machine_environment(driver, tmp_path / "machine", Cards(mib=2048, slowdown=3))


@pytest.fixture
def script(tmp_path: Path, machine: Mapping[str, str]) -> Callable[[str], Done]:
    def done(text: str) -> Done:
        path = tmp_path / "script.py"
        path.write_text(text)
        return run(path, cwd=tmp_path, **machine)

    return done


def hold(done: Done, folder: Path, machine: Mapping[str, str]) -> None:
    """What both print and leave."""
    assert done.code == 0, done.text
    (record,) = (json.loads(path.read_text()) for path in folder.glob("logs/watch/runs/*/run.json"))
    assert record["findings"][0]["id"] == "loading_in_main_process"
    assert record["throughput"]["steps"] == 117  # after 3 of warm-up
    assert "STARVED" in done.text
    assert "DataLoader(num_workers=" in done.text
    with (folder / "telemetry.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    gpus = {"0"} if "FAKE_NVML_SCENARIO" in machine else set()
    assert set(record["gpus"]) == gpus
    assert {row["gpu"] for row in rows} == {"-1"} | gpus


@pytest.mark.slow
def test_a_plain_loop(script: Callable[[str], Done], tmp_path: Path, machine: Mapping[str, str]) -> None:
    hold(script(PLAIN + LOOP), tmp_path, machine)


@pytest.mark.slow
def test_a_trainer_of_lightning(script: Callable[[str], Done], tmp_path: Path, machine: Mapping[str, str]) -> None:
    done = script(LIGHTNING.format(library="lightning.pytorch") + TRAINER)
    hold(done, tmp_path, machine)


@pytest.mark.guests
@pytest.mark.parametrize("first", [LIGHTNING, "from wellfed import GPUCurves\n" + LIGHTNING])
def test_a_trainer_of_the_other_lightning(
    script: Callable[[str], Done], tmp_path: Path, machine: Mapping[str, str], first: str
) -> None:
    """Imported before or after wellfed."""
    pytest.importorskip("pytorch_lightning")
    done = script(first.format(library="pytorch_lightning") + TRAINER)
    hold(done, tmp_path, machine)
