"""Messages about checkpoints at the end of a run, and resuming from them."""

import csv
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn

from tests.end_to_end.commands import weights_of
from tests.kit.few import slow
from tests.kit.own_run import run_own
from wellfed.config.schema import ScheduleConfig
from wellfed.contract import Datasets, LossOutput
from wellfed.record.entries import RunRecord

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")
LARGEST = 600_000
"""Largest file size on the full disk: enough for record and tables, not for the weights."""


class Rows:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        Model.at_sample(index)
        x = torch.randn(400, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True)}


def data() -> Datasets:
    return Datasets(Rows(), Rows())


class Model(nn.Module):
    """A model of 640 KB; tests hook into its training step, its validation step, or into the reading of a sample."""

    at_step: ClassVar[Callable[[int], None]]
    at_validation: ClassVar[Callable[[], None]]
    at_sample: ClassVar[Callable[[int], None]]

    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps = nn.Sequential(nn.Linear(400, 400), nn.Dropout(0.1), nn.Linear(400, 1)), 0

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        if self.training:
            self.steps += 1
            Model.at_step(self.steps)
        else:
            Model.at_validation()
        return LossOutput((self.net(batch["x"]) - batch["y"]).square().mean())


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Linear(400, 2)


class Own(pl.LightningModule):
    """The same model as a LightningModule, with a monitor of a mean over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model.loss(batch).loss
        self.log("train_mean", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model.loss(batch).loss)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [EarlyStopping("train_mean", patience=9, check_on_train_epoch_end=True)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@pytest.fixture(autouse=True)
def nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "at_step", staticmethod(lambda step: None), raising=False)
    monkeypatch.setattr(Model, "at_validation", staticmethod(lambda: None), raising=False)
    monkeypatch.setattr(Model, "at_sample", staticmethod(lambda index: None), raising=False)


@contextmanager
def a_disk_that_fills() -> Iterator[Callable[[], None]]:
    """Returns a function after whose call no file may grow beyond `LARGEST`."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def ran(tmp_path: Path, *overrides: str, model: str = "Model") -> tuple[int, Path]:
    """Trains; returns the exit code and the run folder."""
    usual = ("trainer.max_steps=12", "trainer.max_epochs=null", "trainer.checkpoint_every_steps=3")
    schedule = {} if "workload.schedule" in str(overrides) else {"schedule": ScheduleConfig()}
    own = {"model": {"_target_": f"{__name__}.{model}"}, "data": {"_target_": f"{__name__}.data"}, **schedule}
    return run_own(tmp_path, *usual, "trainer.sanity_batches=0", *overrides, **own)


def test_weights_that_can_not_be_written_are_not_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_disk_that_fills() as fill:
        monkeypatch.setattr(Model, "at_step", staticmethod(lambda step: fill() if step == 5 else None))
        code, folder = ran(tmp_path)
    record = RunRecord.read(folder)
    assert (code, record.status, record.exit_code, record.steps) == (1, "failed", 1, 12)
    assert record.error is not None
    assert record.error["kind"] == "disk"
    told = capsys.readouterr().err
    assert "The weights of step 12 could not be written to" in told
    assert "last saved step 3 of 12. resume=auto goes on from step 3 (last.ckpt)." in told
    assert weights_of(folder)
    assert "val/loss" in record.metrics  # what was trained was still validated


def test_nothing_is_promised_where_nothing_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impatient(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Model, "at_step", staticmethod(impatient))
    code, folder = ran(tmp_path)
    told = capsys.readouterr().err
    assert (code, RunRecord.read(folder).status) == (143, "interrupted")
    assert "last saved step 0 of 1. There is no checkpoint to go on from" in told
    assert "resume=auto goes on" not in told


def rows_of(folder: Path, splits: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    """Returns the metrics of splits; each is listed once."""
    with (folder / "metrics.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["split"] in splits]
    found = {(row["step"], row["split"], row["name"]): row["value"] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize(
    ("model", "every", "log", "splits"),
    [
        ("Model", "null", 2, ("train", "val", "test")),
        slow("Model", "null", 50, ("train", "val", "test")),  # no row is written before the validation
        slow("Model", "4", 2, ("train", "val", "test")),
        slow("Own", "null", 2, ("val",)),  # the sums of its metrics are Lightning's, and in no checkpoint
    ],
)
def test_a_validation_that_fails_is_repeated_by_the_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, every: str, log: int, splits: tuple[str, ...]
) -> None:
    limits = ("trainer.max_steps=null", "trainer.max_epochs=2", "trainer.checkpoint_every_steps=3")
    limits = (*limits, f"trainer.validate_every_steps={every}", f"trainer.log_every_steps={log}")
    code, whole = ran(tmp_path / "whole", *limits, model=model)
    assert code == 0
    calls: list[Any] = []

    def fail_in_the_second_batch() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise KeyError("the evaluation's own fault")

    monkeypatch.setattr(Model, "at_validation", staticmethod(fail_in_the_second_batch))
    code, folder = ran(tmp_path / "cut", *limits, model=model)
    record = RunRecord.read(folder)
    assert (code, record.status, record.steps) == (1, "failed", 5 if every == "null" else 4)
    code, again = ran(tmp_path / "cut", *limits, f"resume={folder}", f"hydra.run.dir={folder}", model=model)
    assert (code, again) == (0, folder)
    assert rows_of(folder, splits) == rows_of(whole, splits)
    assert all(torch.equal(one, weights_of(folder)[name]) for name, one in weights_of(whole).items())


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGHUP, 129), slow(signal.SIGUSR1, 138)])
def test_other_signals_end_a_run_as_sigterm_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signum: int, code: int
) -> None:
    def hear(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(Model, "at_step", staticmethod(hear))
    before = signal.signal(signum, signal.SIG_DFL)  # whoever runs the tests may ignore it
    try:
        ended, folder = ran(tmp_path)
    finally:
        signal.signal(signum, before)
    record = RunRecord.read(folder)
    assert (ended, record.status, record.exit_code, record.steps) == (code, "interrupted", code, 4)
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4
    assert "resume=auto goes on from step 4 (last.ckpt)." in capsys.readouterr().err


def nan_from(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns a model whose loss is NaN from a step of this process on."""
    loss = Model.loss

    def broken(self: Model, batch: dict[str, Tensor]) -> LossOutput:
        found = loss(self, batch).loss
        return LossOutput(found * float("nan") if self.training and self.steps >= step else found)

    monkeypatch.setattr(Model, "loss", broken)


@pytest.mark.slow
def test_what_a_nan_leaves_is_named_as_resume_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``resume=auto`` searches the log folder alone."""
    nan_from(5, monkeypatch)
    ran(tmp_path, "trainer.log_every_steps=1")
    told = capsys.readouterr().err
    assert told.count("resume=auto") == 1
    assert "last saved step 3 of 5. resume=auto goes on from step 3 (last.ckpt)." in told
    elsewhere = tmp_path / "elsewhere"
    ran(tmp_path, "trainer.log_every_steps=1", f"hydra.run.dir={elsewhere}")
    told = capsys.readouterr().err
    assert "resume=auto" not in told
    assert f"last saved step 3 of 5. resume={elsewhere} goes on from step 3 (last.ckpt)." in told


@pytest.mark.slow
def test_a_signal_while_a_checkpoint_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_disk_that_fills() as fill:

        def both(step: int) -> None:
            if step == 5:
                fill()
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(Model, "at_step", staticmethod(both))
        code, folder = ran(tmp_path)
    assert (code, RunRecord.read(folder).status) == (143, "interrupted")
    assert "last saved step 3 of 5." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "lost", "problem"),
    [
        slow("Wider", "", "workload.model", id="another model"),
        pytest.param("Model", "lr_schedulers", "no lr_schedulers", id="not what a resume needs"),
        pytest.param("Model", "totals", "If another version of wellfed wrote it: rerun=", id="of another version"),
    ],
)
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, lost: str, problem: str
) -> None:
    code, folder = ran(tmp_path, "logger.csv=true")
    assert code == 0
    last = folder / "checkpoints" / "last.ckpt"
    if lost:
        write_whole(last, {name: value for name, value in torch.load(last).items() if name != lost})
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    code, _ = ran(tmp_path, f"resume={folder}", f"hydra.run.dir={folder}", "trainer.max_steps=20", model=model)
    told = capsys.readouterr().err
    assert code == 2
    assert problem in told
    after = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after.pop(Path("train.log")).startswith(before.pop(Path("train.log")))
    assert after == before


# -- checkpoints with a right digest and other content -----------------------------------------------------------------


def write_whole(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint with its digest."""
    torch.save(state, path)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["lr_schedulers", *map(slow, ("optimizer_states", "position"))])
def test_a_checkpoint_with_other_content_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    _, folder = ran(tmp_path)
    odd = tmp_path / "odd.ckpt"
    write_whole(odd, {**torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True), key: ["x"]})
    capsys.readouterr()
    code, _ = ran(tmp_path, f"resume={odd}", "trainer.max_steps=14")
    told = capsys.readouterr().err
    assert code == 2
    assert f"{odd}: " in told
    assert list((folder.parent).iterdir()) == [folder]
