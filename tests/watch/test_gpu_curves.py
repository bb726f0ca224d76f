"""GPUCurves in a Trainer: curves for its loggers, times of its steps, and no harm after errors."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.fake_nvml.driver import FakeDriver, FakeGpu, Scenario
from tests.kit.few import few
from tests.kit.tables import rows_of
from tests.kit.wandb_files import stored
from wellfed import GPUCurves
from wellfed.record.entries import RunRecord

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning",  # of Lightning 2.6 with torch 2.13
)


class Slow(Dataset[Tensor]):
    """Samples that take 2 ms each."""

    def __init__(self, number: int, sample_s: float = 0.002) -> None:
        self._number, self._sample_s = number, sample_s

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._sample_s)
        return torch.full((4,), float(index))


class Model(pl.LightningModule):
    def __init__(self, step_s: float = 0.0, error: BaseException | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        torch.nn.init.ones_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)
        self._step_s, self._error = step_s, error

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self._step_s)
        if self._error is not None and batch_idx == 30:
            raise self._error
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., pl.Trainer]:
    def made(*callbacks: Any, logger: Any = False, **more: Any) -> pl.Trainer:
        given = {"max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False}
        given |= {"enable_checkpointing": False, **more}
        return pl.Trainer(
            callbacks=list(callbacks),
            logger=logger,
            accelerator="cpu",
            default_root_dir=tmp_path / "root",
            log_every_n_steps=10,
            **given,
        )

    return made


@pytest.fixture
def card(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with fake_driver.load(Scenario(gpus=[FakeGpu(util=30)])):
        yield


def train(number: int = 40, sample_s: float = 0.001) -> DataLoader[Tensor]:
    return DataLoader(Slow(number, sample_s))


def columns(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.rglob("metrics.csv")
    return rows_of(path)


def logged(rows: Sequence[dict[str, str]], name: str) -> list[tuple[str, str]]:
    return [(row["step"], row[name]) for row in rows if row.get(name)]


@pytest.mark.usefixtures("card")
def test_loggers_get_curves_and_parts_and_their_own_figures_as_ever(
    trainer: Callable[..., pl.Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = GPUCurves(tmp_path / "telemetry.csv", interval_s=0.1, log_dir=tmp_path)
    for name, step_s, callbacks in (("bare", 0.0, []), ("watched", 0.01, [curves])):
        made = trainer(*callbacks, logger=CSVLogger(tmp_path / name), max_epochs=2)
        made.fit(Model(step_s), train(60, step_s / 10), DataLoader(Slow(4)))
    bare, watched = columns(tmp_path / "bare"), columns(tmp_path / "watched")
    for name in ("train_loss", "val_loss"):
        assert logged(bare, name) == logged(watched, name) != []
    assert [value for _, value in logged(watched, "gpu0/util_pct")] == ["30.0"] * len(logged(watched, "gpu0/util_pct"))
    assert len(logged(watched, "gpu0/util_pct")) >= 3
    times = [float(value) for _, value in logged(watched, "telemetry/time_s")]
    assert times == sorted(times)
    assert times[-1] > 1
    assert float(logged(watched, "step/compute_ms")[-1][1]) >= 10
    assert {row["phase"] for row in rows_of(tmp_path / "telemetry.csv")} >= {"train"}
    summary, record = curves.summary, RunRecord.read(Path(curves.summary["folder"]))
    assert (summary["steps"], summary["gpus"]["0"]["util_pct"]["mean"]) == (117, 30)
    assert (record.steps, record.epochs, record.status, record.phases["validate"]["times"]) == (120, 2, "ok", 3)
    assert capsys.readouterr().err.count("Report ") == 1


@pytest.mark.parametrize(("error", "raised"), [(ValueError("mine"), ValueError), (KeyboardInterrupt(), SystemExit)])
def test_an_error_goes_on_its_way_and_the_record_is_there(
    trainer: Callable[..., pl.Trainer], tmp_path: Path, error: BaseException, raised: type
) -> None:
    curves, before = GPUCurves(quiet=True, log_dir=tmp_path), (DataLoader.__iter__, torch.save)
    with pytest.raises(raised):
        trainer(curves).fit(Model(error=error), train())
    record = RunRecord.read(Path(curves.summary["folder"]))
    assert (record.steps, record.status) == (30, "failed" if raised is ValueError else "interrupted")
    assert (DataLoader.__iter__, torch.save) == before


class Broken(Logger):
    """Logger that fails or is slow."""

    name, version = "broken", 0

    def __init__(self, call_s: float | None = None) -> None:
        super().__init__()
        self.calls: list[dict[str, float]] = []
        self._call_s = call_s

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if not any("/" in name for name in metrics):  # the module's own
            return
        self.calls.append(dict(metrics))
        if self._call_s is None:
            raise OSError("no such server")
        time.sleep(self._call_s)

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        """Returns None."""


@pytest.mark.slow
def test_a_logger_that_fails_is_left_alone_and_others_go_on(
    trainer: Callable[..., pl.Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, curves = Broken(), GPUCurves(interval_s=0.1, quiet=True, log_dir=tmp_path)
    trainer(curves, logger=[broken, CSVLogger(tmp_path / "csv")]).fit(Model(0.01), train(30))
    assert capsys.readouterr().err.count("Broken gets no curves any more (OSError: no such server).") == 1
    assert len(broken.calls) == 1
    assert len(logged(columns(tmp_path / "csv"), "host/rss_gib")) >= 1
    assert curves.summary["steps"] == 27


@pytest.mark.parametrize(
    "hook", few(["gpu_curves.mean_of", "script_record.ScriptRecord.begin", "script_record.ScriptRecord.finish"], 1)
)
def test_an_error_of_ours_harms_nothing(
    trainer: Callable[..., pl.Trainer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    hook: str,
) -> None:
    monkeypatch.setattr(f"wellfed.watch.{hook}", lambda *given, **named: 1 / 0)
    made = trainer(GPUCurves(log_dir=tmp_path))
    made.fit(Model(), train(10), DataLoader(Slow(2)))
    assert made.global_step == 10
    assert capsys.readouterr().err.count("watches no more (ZeroDivisionError") == 1


@pytest.mark.usefixtures("card")
@pytest.mark.slow
def test_wandb_draws_curves_against_their_time_and_the_rest_as_ever(
    trainer: Callable[..., pl.Trainer], tmp_path: Path
) -> None:
    found = {}
    for name, callbacks in (("bare", []), ("watched", [GPUCurves(interval_s=0.1, quiet=True, log_dir=tmp_path)])):
        logger = WandbLogger(save_dir=tmp_path / name, offline=True, project="test", prefix="mine")
        (tmp_path / name).mkdir()
        trainer(*callbacks, logger=logger).fit(Model(0.02), train(100))
        logger.experiment.finish()
        (folder,) = (tmp_path / name / "wandb").glob("offline-run-*")
        found[name] = stored(folder)
    curves = [each.curve("trainer/global_step", "mine-train_loss") for each in found.values()]
    assert curves[0] == curves[1] != []
    watched = found["watched"]
    assert watched.axes["gpu0/util_pct"] == watched.axes["host/cpu_pct"] == "telemetry/time_s"
    drawn = watched.curve("telemetry/time_s", "gpu0/util_pct")
    assert len(drawn) >= 3
    assert {value for _, value in drawn} == {30.0}
    assert watched.curve("trainer/global_step", "mine-step/compute_ms")
