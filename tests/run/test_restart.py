"""Runs that go on from their last checkpoint where memory ran out in a step that can't be done again."""

from __future__ import annotations

import csv
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.commands import weights_of
from tests.kit.own_run import run_own
from wellfed.config.schema import ScheduleConfig
from wellfed.contract import Datasets, LossOutput
from wellfed.errors import EXIT_OUT_OF_MEMORY, OutOfMemoryExhausted, RestartNeeded
from wellfed.record.entries import RunRecord
from wellfed.run.restart import MOST_RESTARTS, Restarts, with_changes, words_again

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
STEP, SAMPLES = 8, 44
"""Five steps and a half an epoch."""


class Rows:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True), "index": torch.tensor(index)}


def data() -> Datasets:
    return Datasets(Rows(), Rows())


class Guest(pl.LightningModule):
    """Notes what it has seen in each step; ``room`` says how many samples have room in a step."""

    room: ClassVar[Callable[[int], int]]
    seen: ClassVar[list[tuple[int, list[int]]]]
    alive: ClassVar[list[weakref.ref[Guest]]]

    def __init__(self, by_hand: bool = False, batch_norm: bool = False, lbfgs: bool = False) -> None:
        super().__init__()
        self.optimizer = torch.optim.LBFGS if lbfgs else torch.optim.SGD
        self.automatic_optimization = not by_hand
        assert not any(each() for each in Guest.alive), "the failed training is still in memory"
        Guest.alive.append(weakref.ref(self))
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.norm = nn.BatchNorm1d(3) if batch_norm else nn.Identity()

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.net(self.norm(batch["x"])) - batch["y"]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        held = self.net(batch["x"])  # as activations are by the traceback
        if len(batch["x"]) > Guest.room(self.global_step):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {held.nbytes} bytes.")
        Guest.seen.append((self.global_step, batch["index"].tolist()))
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=0.1)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "step", "frequency": 2}}


@pytest.fixture(autouse=True)
def guest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guest, "room", staticmethod(lambda step: STEP), raising=False)
    monkeypatch.setattr(Guest, "seen", [], raising=False)
    monkeypatch.setattr(Guest, "alive", [], raising=False)


def ran(
    tmp_path: Path, *overrides: str, model: str = "Guest", optimizer: Any = None, **arguments: Any
) -> tuple[int, Path]:
    """Train; the exit code and the run folder."""
    gc.collect()  # what another run of this test has left
    Guest.alive.clear()
    return run_own(
        tmp_path,
        *("trainer.max_epochs=2", "trainer.log_every_steps=1", "trainer.checkpoint_every_steps=3", *overrides),
        model={"_target_": f"{__name__}.{model}", **arguments},
        data={"_target_": f"{__name__}.data"},
        optimizer=optimizer,
        schedule=ScheduleConfig(),
    )


def restarts(folder: Path) -> list[dict[str, Any]]:
    return [event for event in RunRecord.read(folder).events if event["kind"] == "restart"]


def check_alike(folder: Path, other: Path) -> None:
    for name, value in weights_of(other).items():
        torch.testing.assert_close(weights_of(folder)[name], value, rtol=1e-6, atol=1e-7)


def check_tables(folder: Path, steps: int) -> None:
    """A row a step, and each figure once a step."""
    with (folder / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, steps + 1))
    assert [int(row["samples"]) for row in rows] == [8, 8, 8, 8, 8, 4] * (steps // 6)
    with (folder / "metrics.csv").open() as file:
        figures = Counter((row["step"], row["split"], row["name"]) for row in csv.DictReader(file))
    assert set(figures.values()) == {1}


@pytest.mark.slow
def test_a_guest_goes_on_from_its_checkpoint_in_halves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, undisturbed = ran(tmp_path)
    assert code == 0
    whole = dict(Guest.seen)
    assert sorted(whole) == list(range(12))

    Guest.seen.clear()
    Guest.room = staticmethod(lambda step: 4 if step >= 4 else STEP)
    code, folder = ran(tmp_path)
    assert code == 0
    (event,) = restarts(folder)
    assert (event["step"], Path(event["checkpoint"]).name) == (3, "last.ckpt")
    assert event["changes"] == {"memory.micro_batch": 4, "memory.accumulate": 2}
    assert "Out of memory in step 5 with 8 samples at a time: CUDA out of memory" in event["because"]
    assert (
        "Restarting from last.ckpt of step 3 with memory.micro_batch=4 memory.accumulate=2" in capsys.readouterr().out
    )
    record = RunRecord.read(folder)
    assert (record.status, record.steps, record.samples, record.epochs) == ("ok", 12, 2 * SAMPLES, 2)
    assert (record.plan["memory.accumulate"]["value"], record.plan["memory.accumulate"]["source"]) == (2, "measured")

    again = Guest.seen[4:]  # steps 1 to 4 were done whole, and the last of them once more
    assert [step for step, _ in again] == [step for step in range(3, 12) for _ in range(2)]
    assert {len(indices) for _, indices in again} == {4, 2}
    for step in range(3, 12):
        assert [index for at, part in again if at == step for index in part] == whole[step]
    check_alike(folder, undisturbed)
    check_tables(folder, 12)

    Guest.room = staticmethod(lambda step: STEP)
    code, stopped = ran(tmp_path, "trainer.max_steps=3")
    checkpoint = stopped / "checkpoints" / "last.ckpt"
    code, typed = ran(tmp_path, f"resume={checkpoint}", "memory.accumulate=2")
    assert code == 0
    for name, value in weights_of(typed).items():
        assert torch.equal(weights_of(folder)[name], value), name


@pytest.mark.slow
def test_without_a_checkpoint_it_starts_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, undisturbed = ran(tmp_path)
    Guest.room = staticmethod(lambda step: 2 if step >= 1 else STEP)
    code, folder = ran(tmp_path)
    assert code == 0
    assert [event["changes"]["memory.accumulate"] for event in restarts(folder)] == [2, 4]
    assert all((event["checkpoint"], event["step"]) == (None, 0) for event in restarts(folder))
    assert "No checkpoint yet: starting again with memory.micro_batch=2" in capsys.readouterr().out
    check_alike(folder, undisturbed)
    check_tables(folder, 12)


@pytest.mark.slow
def test_uneven_parts_weigh_what_they_are(tmp_path: Path) -> None:
    """Six and four of eight samples make three parts, the last step of an epoch has four."""
    _, undisturbed = ran(tmp_path)
    code, folder = ran(tmp_path, "memory.accumulate=3")
    assert code == 0
    check_alike(folder, undisturbed)


def test_not_even_one_sample_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Guest.room = staticmethod(lambda step: 0)
    code, folder = ran(tmp_path)
    assert code == EXIT_OUT_OF_MEMORY
    assert len(restarts(folder)) == 3
    said = capsys.readouterr().err
    assert "with 1 sample at a time" in said
    assert "Largest parts: " in said
    assert "Traceback" not in said
    assert RunRecord.read(folder).status == "oom"


@pytest.mark.parametrize(
    ("overrides", "arguments", "says"),
    [
        (["memory.on_oom=fail"], {}, "CUDA out of memory"),
        ([], {"by_hand": True}, "this LightningModule steps by hand"),
        ([], {"batch_norm": True}, "BatchNorm's statistics belong to the whole batch"),
        ([], {"lbfgs": True}, "LBFGS needs whole steps"),
    ],
)
def test_what_is_not_done_in_parts_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], arguments: dict[str, Any], says: str
) -> None:
    Guest.room = staticmethod(lambda step: 4)
    code, folder = ran(tmp_path, *overrides, **arguments)
    assert code == EXIT_OUT_OF_MEMORY
    assert restarts(folder) == []
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


class Plain(nn.Module):
    calls: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        Plain.calls += self.training
        return LossOutput((self.net(batch["x"]) - batch["y"]).square().mean())


class HalfDone(torch.optim.SGD):
    """Its steps after these batches change weights and then find no memory, each once."""

    fail_at: ClassVar[set[int]] = set()

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if Plain.calls in HalfDone.fail_at:
            HalfDone.fail_at.discard(Plain.calls)
            raise RestartNeeded("Out of memory in the optimizer's step, which was applied in part.", {})
        return loss


def test_a_step_applied_in_part_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = {"_target_": f"{__name__}.HalfDone", "lr": 0.1}
    code, undisturbed = ran(tmp_path, model="Plain", optimizer=optimizer)
    assert code == 0
    monkeypatch.setattr(Plain, "calls", 0)
    monkeypatch.setattr(HalfDone, "fail_at", {5, 7})  # step 5, and step 5 once more
    code, folder = ran(tmp_path, model="Plain", optimizer=optimizer)
    assert code == 0
    assert [(event["step"], event["changes"]) for event in restarts(folder)] == [(3, {}), (3, {})]
    for name, value in weights_of(undisturbed).items():
        assert torch.equal(weights_of(folder)[name], value), name
    check_tables(folder, 12)


class Evaluated(nn.Module):
    """May have no room for more than 2 samples of an evaluation."""

    has_room: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        if not (Evaluated.has_room or self.training or len(batch["x"]) <= 2):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return LossOutput((self.net(batch["x"]) - batch["y"]).float().square().mean())


@pytest.mark.parametrize("precision", ["bf16-true"])
def test_an_evaluation_is_repeated_in_the_precision_of_the_run(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adam = {"_target_": "torch.optim.Adam"}
    found = []
    for has_room in (True, False):
        monkeypatch.setattr(Evaluated, "has_room", has_room)
        code, folder = ran(
            tmp_path, f"gpu.precision={precision}", "loader.num_workers=0", model="Evaluated", optimizer=adam
        )
        assert code == 0
        record = RunRecord.read(folder)
        assert bool([event for event in record.events if event["kind"] == "oom"]) is not has_room
        found.append(record.metrics["val/loss"])
    assert found[1] == pytest.approx(found[0], rel=2e-3)


def test_an_optimizer_that_works_on_one_weight_at_a_time_does_so_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    step = torch.optim.Adam.step

    def noted(self: torch.optim.Adam, *words: Any) -> Any:
        seen.append(self.param_groups[0]["foreach"])
        return step(self, *words)

    adam = {"_target_": "torch.optim.Adam", "fused": False}
    code, folder = ran(tmp_path, "trainer.max_epochs=1", "seed=1", model="Evaluated", optimizer=adam)
    assert code == 0
    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    more = (f"resume={folder}", "trainer.max_epochs=2", f"hydra.run.dir={folder}", "seed=1")
    assert ran(tmp_path, *more, model="Evaluated", optimizer={**adam, "foreach": False})[0] == 0
    assert set(seen) == {False}


def test_the_run_is_not_restarted_for_ever(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.ckpt"
    earlier.touch()
    found = Restarts(tmp_path, began_with=earlier)
    for number in range(MOST_RESTARTS):
        assert found.checkpoint_for(RestartNeeded("no room.", {"memory.micro_batch": number})).name == "earlier.ckpt"
    with pytest.raises(OutOfMemoryExhausted, match=r"no room. .* 12 times \(memory.micro_batch=0, then ") as caught:
        found.checkpoint_for(RestartNeeded("no room.", {"memory.micro_batch": 1}, "host_oom"))
    assert not isinstance(caught.value, RestartNeeded)
    assert caught.value.kind == "host_oom"


@pytest.mark.parametrize(
    ("words", "changes", "folder", "expected"),
    [
        (
            ["src/train.py", "memory.accumulate=2", "hydra.run.dir=typed", "trainer.devices=2"],
            {"memory.micro_batch": 4},
            None,
            ["src/train.py", "trainer.devices=2", "++memory.micro_batch=4", "++memory.accumulate=null"],
        ),
        (
            ["-m", "wellfed", "train", "resume=auto", "hydra.run.dir=/logs/w", "++workload.optimizer.foreach=true"],
            {"workload.optimizer.foreach": False},
            Path("/logs/w"),
            ["-m", "wellfed", "train", "hydra.run.dir=/logs/w", "++workload.optimizer.foreach=false", "resume=/logs/w"],
        ),
    ],
)
def test_ranks_are_started_again_by_the_same_command(
    words: list[str], changes: dict[str, object], folder: Path | None, expected: list[str]
) -> None:
    assert words_again(words, changes, folder) == expected


def test_changes_go_to_the_plan_or_else_to_the_configuration() -> None:
    from tests.plan.test_decide import config, planned

    given = config()
    changes = {"memory.micro_batch": 4, "workload.optimizer.foreach": False}
    after, plan = with_changes(given, planned(given), changes, "it was too much")
    assert plan.memory.micro_batch == 4
    assert plan.knobs["memory.micro_batch"].because == "it was too much"
    assert after.workload.optimizer["foreach"] is False
    assert after.memory == given.memory
