"""Runs whose memory runs out in a step that can't be done again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.kit.composed import compose
from tests.kit.own_run import run_own
from wellfed.config.schema import ScheduleConfig
from wellfed.contract import Datasets, LossOutput
from wellfed.errors import EXIT_OUT_OF_MEMORY, RestartNeeded
from wellfed.record.entries import RunRecord
from wellfed.run.folder.run_folder import RunFolder
from wellfed.run.restart import Restarts, words_again

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


def sampled() -> Datasets:
    """Batches of eight, by a sampler."""
    return Datasets(DataLoader(Rows(), batch_sampler=[[*range(at, at + STEP)] for at in range(0, 40, STEP)]), Rows())  # type: ignore[arg-type]


class Guest(pl.LightningModule):
    """``room`` says how many samples have room in a step."""

    room: ClassVar[Callable[[int], int]]

    def __init__(self, by_hand: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.norm = nn.BatchNorm1d(3) if batch_norm else nn.Identity()

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.net(self.norm(batch["x"])) - batch["y"]).square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        held = self.net(batch["x"])  # as activations are by the traceback
        if len(batch["x"]) > Guest.room(self.global_step):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {held.nbytes} bytes.")
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "step", "frequency": 2}}


@pytest.fixture(autouse=True)
def guest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guest, "room", staticmethod(lambda step: STEP), raising=False)


def ran(
    tmp_path: Path, *overrides: str, model: str = "Guest", data: str = "data", optimizer: Any = None, **arguments: Any
) -> tuple[int, Path]:
    """Train; the exit code and the run folder."""
    return run_own(
        tmp_path,
        *("trainer.max_epochs=2", "trainer.log_every_steps=1", "trainer.checkpoint_every_steps=3", *overrides),
        model={"_target_": f"{__name__}.{model}", **arguments},
        data={"_target_": f"{__name__}.{data}"},
        optimizer=optimizer,
        schedule=ScheduleConfig(),
    )


def restarts(folder: Path) -> list[dict[str, Any]]:
    return [event for event in RunRecord.read(folder).events if event["kind"] == "restart"]


def test_not_even_one_sample_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Guest.room = staticmethod(lambda step: 0)
    code, folder = ran(tmp_path, "memory.accumulate=8")
    assert code == EXIT_OUT_OF_MEMORY
    said = capsys.readouterr().err
    assert "with 1 sample at a time" in said
    assert "Largest parts: " in said
    assert "Traceback" not in said
    assert RunRecord.read(folder).status == "oom"


def test_a_run_that_no_command_has_started_says_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Guest.room = staticmethod(lambda step: 4 if step >= 4 else STEP)
    code, folder = ran(tmp_path)
    assert code == EXIT_OUT_OF_MEMORY
    said = " ".join(capsys.readouterr().err.split())
    assert "Out of memory in step 5 with 8 samples at a time: CUDA out of memory" in said
    assert "Start it again with memory.accumulate=2." in said
    assert "resume=auto goes on from step 3 (last.ckpt)." in said
    code, again = ran(tmp_path, f"resume={folder}", f"hydra.run.dir={folder}", "memory.accumulate=2")
    assert (code, again) == (0, folder)


@pytest.mark.parametrize(
    ("overrides", "arguments", "says"),
    [
        (["memory.on_oom=fail"], {}, "CUDA out of memory"),
        ([], {"by_hand": True}, "this LightningModule steps by hand"),
        ([], {"batch_norm": True}, "BatchNorm's statistics belong to the whole batch"),
        ([], {"data": "sampled"}, "and its batch_size is None"),
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def why_not(monkeypatch: pytest.MonkeyPatch, times: int) -> str | None:
    monkeypatch.setattr("sys.argv", ["src/train.py"])
    monkeypatch.setenv("WELLFED_RESTARTS", str(times))
    return Restarts().why_not(RestartNeeded("no room.", {"memory.micro_batch": 4}), compose([]), is_own=True)


def test_the_run_is_not_restarted_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(monkeypatch, 11) is None
    assert why_not(monkeypatch, 12) == "Start it again with memory.micro_batch=4. It has been restarted 12 times."


def test_a_restart_leaves_nothing_but_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has just ended, and another one has asked for a restart, too."""
    folder, begun = RunFolder(tmp_path / "run", is_new=True), []

    class Rank:
        def __init__(self, has_ended: bool) -> None:
            self.has_ended = has_ended

        def kill(self) -> None:
            if self.has_ended:
                raise psutil.NoSuchProcess(1)
            (folder.path / ".restart.json").write_text("{}")

    folder.path.mkdir()
    RunRecord.start("run").write(folder.path)
    (folder.path / "steps.csv").touch()
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [Rank(has_ended=True), Rank(has_ended=False)])
    monkeypatch.setattr("os.execve", lambda *words: begun.append(words))
    for is_new in (False, True):
        Restarts().now(replace(folder, is_new=is_new), {"because": "no room", "changes": {}, "events": []})
        assert not (folder.path / ".restart.json").exists()
        assert RunRecord.read(folder.path).status == "oom"
    assert len(begun) == 2
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("words", "changes", "folder", "resumes", "expected"),
    [
        (
            ["src/train.py", "memory.accumulate=2", "hydra.run.dir=typed", "trainer.devices=2"],
            {"memory.micro_batch": 4},
            RunFolder(Path("/logs/w"), is_new=False),
            False,
            ["src/train.py", "trainer.devices=2", "++memory.micro_batch=4", "++memory.accumulate=null"],
        ),
        (
            ["src/train.py", "hydra.run.dir=w", "resume=/a.ckpt"],
            {"memory.micro_batch": 4, "memory.accumulate": 3},
            RunFolder(Path("/logs/w"), is_new=True),
            False,
            [
                *("src/train.py", "resume=/a.ckpt", "++memory.micro_batch=null", "++memory.accumulate=3"),
                "hydra.run.dir=/logs/w",
            ],
        ),
        (
            ["-m", "wellfed", "train", "resume=auto", "hydra.run.dir=/logs/w", "++workload.optimizer.foreach=true"],
            {"workload.optimizer.foreach": False},
            RunFolder(Path("/logs/w"), is_new=True),
            True,
            ["-m", "wellfed", "train", "++workload.optimizer.foreach=false", "resume=/logs/w"],
        ),
    ],
)
def test_a_run_is_started_again_by_the_same_command(
    words: list[str], changes: dict[str, object], folder: RunFolder, resumes: bool, expected: list[str]
) -> None:
    assert words_again(words, changes, folder, resumes=resumes) == expected
