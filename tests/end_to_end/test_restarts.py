"""A user's LightningModule whose step finds no memory: the run goes on from its last checkpoint in smaller parts."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.commands import Done, record_of, run_folders, train_own, weights_of
from tests.fake_cuda.machine import FakeCuda
from wellfed.run.restart import show_changes

MODULE = '''
import os
import lightning.pytorch as pl
import torch
from torch import nn
from wellfed import Datasets

ROOM = 2**20  # numbers of four bytes

class Rows:
    def __len__(self): return 72
    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(), "name": str(index)}

class Even(Rows):
    def __len__(self): return 80

class Data(pl.LightningDataModule):
    def train_dataloader(self): return torch.utils.data.DataLoader(Even(), 16, shuffle=True)
    def val_dataloader(self): return torch.utils.data.DataLoader(Rows(), 8)

def fed(): return Datasets(Even(), Rows())

class Hungry(pl.LightningModule):
    """Needs 12 MiB a sample, and from the sixth step on 16, where it trains on a card."""
    def __init__(self, room=16, since=5, dropout=0.0):
        super().__init__()
        self.room, self.since = room, since
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        x, y, names = batch["x"], batch["y"], batch["name"]
        assert len(x) == len(names)
        if not x.is_cuda and self.global_step >= self.since and len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = 0
        for _ in range(1 if self.global_step < 5 or not x.is_cuda else 2):
            activations = (self.net(x) * torch.ones(1, ROOM if x.is_cuda else 1, device=x.device)).tanh()
            loss = loss + (activations.mean(1) - y).square().mean() / 2
        with open("seen", "a") as file: print(self.global_step, *names, file=file)
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch["x"])[:, 0] - batch["y"]).square().mean())
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.05)

def full(): raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

class Plain(nn.Module):
    """Finds no memory for more than `room` samples from a call on, on rank 1 of several alone."""
    def __init__(self, room=16, since=0, dropout=0.0):
        super().__init__()
        self.room, self.since, self.calls = room, since, 0
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))
    def loss(self, batch):
        x = batch["x"]
        if self.training:
            self.calls += 1
            if os.environ.get("LOCAL_RANK", "1") == "1" and len(x) > self.room and self.calls >= self.since: full()
        return (self.net(x)[:, 0] - batch["y"]).square().mean()

class HalfDone(torch.optim.SGD):
    """Changes a weight in a step, and finds no memory then, once in a folder: in a step of rank 1, or alone in
    the first step after a checkpoint."""
    def __init__(self, parameters, fails_at=0, **settings):
        super().__init__(parameters, **settings)
        self.steps, self.fails_at = 0, fails_at
    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.steps += 1
        is_time = self.steps == self.fails_at and os.environ.get("LOCAL_RANK") == "1"
        if "LOCAL_RANK" not in os.environ:
            is_time = self.fails_at and os.path.exists("typed/checkpoints/last.ckpt")
        if is_time and not os.path.exists("failed"):
            open("failed", "w").close()
            with torch.no_grad(): self.param_groups[0]["params"][0].add_(1.0)
            full()
        super().step()
        return loss

def plain_data(): return Datasets(Tensors(), Tensors(), Tensors())

class Tensors(Rows):
    def __getitem__(self, index):
        x = super().__getitem__(index)["x"]
        return {"x": x, "y": x.sum()}
'''

OPTION = """
name: hungry
model: {_target_: hungry.Hungry}
data: {_target_: hungry.Data}
"""
STEPS = 10
"""Two epochs."""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "hungry.py").write_text(MODULE, encoding="utf-8")
    option = tmp_path / "configs" / "workload" / "hungry.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(OPTION, encoding="utf-8")
    return tmp_path


def trained(user: Path, folder: str, *overrides: str, **more: str) -> tuple[Done, Path]:
    """Train in a folder of its own; the run folder, which has what was seen beside it."""
    cwd = user / folder
    often = ("trainer.max_epochs=2", "trainer.checkpoint_every_steps=3")
    done = train_own(user, "hungry", *often, *overrides, cwd=cwd, **more)
    assert "Traceback" not in done.err, done.text[-3000:]
    return done, (run_folders(cwd, "hungry") or [cwd / "typed"])[-1]


def seen(user: Path, folder: str) -> list[tuple[int, list[str]]]:
    """Step and samples of each part that was done."""
    lines = [line.split() for line in (user / folder / "seen").read_text().splitlines()]
    return [(int(step), names) for step, *names in lines]


def by_step(parts: list[tuple[int, list[str]]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for step, names in parts:
        found.setdefault(step, []).extend(names)
    return found


def check_restart(folder: Path) -> None:
    record = record_of(folder)
    assert (record["status"], record["steps"], record["samples"]) == ("ok", STEPS, 160)
    (event,) = (event for event in record["events"] if event["kind"] == "restart")
    assert (event["step"], Path(event["checkpoint"]).name) == (3, "last.ckpt")
    assert event["changes"] == {"memory.accumulate": 2}
    assert (record["plan"]["memory.micro_batch"]["value"], record["plan"]["memory.accumulate"]["value"]) == (8, 2)
    assert "ceiling_failed" not in {event["kind"] for event in record["events"]}
    steps = [line.split(",")[:1] + line.split(",")[4:6] for line in (folder / "steps.csv").read_text().splitlines()[1:]]
    assert steps[:3] == [[str(step), "16", "1"] for step in (1, 2, 3)]
    assert steps[3:] == [[str(step), "8", "2"] for step in range(4, STEPS + 1)]


@pytest.mark.slow
def test_a_guest_that_finds_no_room_on_its_card(user: Path, fake_cuda: FakeCuda) -> None:
    settings = ("telemetry.ceiling_steps=0", "gpu.precision=32-true")
    done, whole = trained(user, "large", *settings, **fake_cuda.environment(cards=1, mib=8192))
    assert done.code == 0, done.text[-3000:]
    done, folder = trained(user, "small", *settings, **fake_cuda.environment(cards=1, mib=240))
    assert done.code == 0, done.text[-3000:]
    check_restart(folder)
    assert "Restarting from last.ckpt with memory.accumulate=2" in done.out
    expected, parts = by_step(seen(user, "large")), seen(user, "small")
    again = parts[6:]  # five steps, and one whose backward pass found no memory
    assert {len(names) for _, names in again} == {8}
    assert by_step(again) == {step: names for step, names in expected.items() if step >= 3}
    for name, value in weights_of(whole).items():
        torch.testing.assert_close(weights_of(folder)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_restart_is_what_would_have_been_typed(user: Path) -> None:
    """Dropout, worker processes and all."""
    settings = (
        "trainer.accelerator=cpu",
        "+workload.model.dropout=0.3",
        "loader.backend=torch",
        "loader.num_workers=2",
    )
    done, folder = trained(user, "once", *settings, "+workload.model.room=8")
    assert done.code == 0, done.text[-3000:]
    check_restart(folder)
    done, first = trained(user, "first", *settings, "trainer.max_steps=3")
    assert done.code == 0, done.text[-3000:]
    resume = f"resume={first / 'checkpoints' / 'last.ckpt'}"
    done, typed = trained(user, "typed", *settings, resume, "trainer.max_steps=null", "memory.accumulate=2")
    assert done.code == 0, done.text[-3000:]
    for name, value in weights_of(typed).items():
        assert torch.equal(weights_of(folder)[name], value), name


@pytest.mark.slow
def test_without_a_checkpoint_a_guest_starts_again_in_its_folder(user: Path) -> None:
    settings = ("trainer.accelerator=cpu", "logger=csv")
    done, whole = trained(user, "whole", *settings)
    assert done.code == 0, done.text[-3000:]
    done, folder = trained(user, "again", *settings, "+workload.model.room=4", "+workload.model.since=1")
    assert done.code == 0, done.text[-3000:]
    assert done.out.count("No checkpoint yet: starting again with memory.accumulate=") == 2
    assert [each.name for each in run_folders(user / "again", "hungry")] == [folder.name]
    record = record_of(folder)
    assert (record["status"], record["steps"], record["samples"]) == ("ok", STEPS, 160)
    events = [event for event in record["events"] if event["kind"] in ("oom", "restart")]
    assert [event["kind"] for event in events] == ["oom", "restart"] * 2
    assert [event["changes"]["memory.accumulate"] for event in events[1::2]] == [2, 4]
    assert all((event["checkpoint"], event["step"]) == (None, 0) for event in events[1::2])
    with (folder / "steps.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, STEPS + 1))
    for name, value in weights_of(whole).items():
        torch.testing.assert_close(weights_of(folder)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_plain_run_goes_back_where_an_optimizer_has_changed_a_part(user: Path) -> None:
    """In the optimizer's step, back to the checkpoint before it, in a folder that was typed."""
    alone = (*PLAIN[:-3], "trainer.accelerator=cpu", "++workload.model.dropout=0", "hydra.run.dir=typed")
    done, folder = trained(user, "failing", *alone, "++workload.optimizer.fails_at=5")
    assert done.code == 0, done.text[-3000:]
    assert (restart_of(folder)["step"], restart_of(folder)["changes"]) == (3, {"memory.micro_batch": 8})
    kinds = [event["kind"] for event in record_of(folder)["events"] if event["kind"] in ("oom", "step_down")]
    assert kinds == ["oom", "step_down"]
    done, whole = trained(user, "whole", *alone)
    assert done.code == 0, done.text[-3000:]
    for name, value in weights_of(whole).items():
        torch.testing.assert_close(weights_of(folder)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_two_ranks_sum_the_parts_of_their_steps(user: Path) -> None:
    fed = ("trainer.accelerator=cpu", "workload.data._target_=hungry.fed", "workload.effective_batch_size=16")
    ddp = (*fed, "trainer=ddp", "trainer.devices=2")
    done, whole = trained(user, "whole", *fed)
    assert done.code == 0, done.text[-3000:]
    done, folder = trained(user, "ranks", *ddp, "memory.accumulate=2")
    assert done.code == 0, done.text[-3000:]
    assert record_of(folder)["samples"] == 160
    for name, value in weights_of(whole).items():
        torch.testing.assert_close(weights_of(folder)[name], value, rtol=1e-5, atol=1e-6)
    done, folder = trained(user, "full", *ddp, "+workload.model.room=4")
    assert done.code == 3, done.text[-3000:]
    assert "restart" not in {event["kind"] for event in record_of(folder)["events"]}


def restart_of(folder: Path) -> dict[str, Any]:
    record = record_of(folder)
    assert (record["status"], record["steps"], record["samples"]) == ("ok", STEPS, 144)
    (event,) = (event for event in record["events"] if event["kind"] == "restart")
    return event


PLAIN = (
    *("workload.model._target_=hungry.Plain", "workload.data._target_=hungry.plain_data"),
    *("++workload.optimizer._target_=hungry.HalfDone", "++workload.optimizer.lr=0.05"),
    *("workload.effective_batch_size=16", "++workload.model.dropout=0.3"),
    *("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu"),
)
"""A plain model on two ranks, each with 8 samples of a step."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "step", "smaller"),
    [
        # In step 7, after the checkpoint of step 6.
        (("++workload.model.room=4", "++workload.model.since=7"), 6, "memory.micro_batch=4"),
        # In the optimizer's step 5, when rank 0 has stepped: back to the checkpoint of step 3.
        (("++workload.optimizer.fails_at=5",), 3, "memory.micro_batch=4"),
        # In the first step: from the beginning, in the same folder.
        (("++workload.model.room=4", "hydra.run.dir=typed"), 0, "memory.micro_batch=4"),
    ],
)
def test_ranks_restart_as_they_would_by_hand(user: Path, failing: tuple[str, ...], step: int, smaller: str) -> None:
    """Bit for bit, dropout included."""
    done, folder = trained(user, "failing", *PLAIN, *failing)
    assert done.code == 0, done.text[-3000:]
    event = restart_of(folder)
    assert event["step"] == step
    kind, before, *_ = (one for one in record_of(folder)["events"] if one["kind"] in ("oom", "step_down", "ladder"))
    assert (kind["kind"], kind["rank"], kind["step"]) == ("oom", 1, {6: 7, 3: 5, 0: 1}[step])
    assert before["kind"] == "step_down"
    assert smaller in show_changes(event["changes"])
    assert f"Out of memory on rank 1 {'in the' if step == 3 else 'with micro-batches of 8'}" in event["because"]
    with (folder / "steps.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, STEPS + 1))
    by_hand: tuple[str, ...] = (smaller,)
    if step:
        done, first = trained(user, "first", *PLAIN, f"trainer.max_steps={step}")
        assert done.code == 0, done.text[-3000:]
        by_hand += (f"resume={first / 'checkpoints' / 'last.ckpt'}", "trainer.max_steps=null")
    done, other = trained(user, "by_hand", *PLAIN, *by_hand)
    assert done.code == 0, done.text[-3000:]
    for name, value in weights_of(other).items():
        assert torch.equal(weights_of(folder)[name], value), name
