"""GPUCurves in a Trainer: curves for its loggers, times of its steps, and no harm after errors."""

import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.fake_nvml.driver import FakeDriver, FakeGpu, Scenario
from tests.kit.tables import rows_of
from tests.kit.wandb_files import stored
from wellfed import GPUCurves
from wellfed.monitor.gpu_curves import thinned
from wellfed.monitor.loop_watch import LoopSteps
from wellfed.observe.telemetry.series import Sample

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
    curves = GPUCurves(tmp_path / "telemetry.csv", interval_s=0.1)
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
    out = capsys.readouterr().out
    assert "GPUCurves: GPU 0: utilisation 30 % on average: starved" in out
    assert "over 117 steps after 3 of warm-up" in out
    assert out.count("steps/s") == 1


@pytest.mark.slow
def test_each_part_of_a_step_is_told_apart(trainer: Callable[..., pl.Trainer]) -> None:
    class Talks(pl.Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            time.sleep(0.004)

    curves = GPUCurves(quiet=True)
    trainer(curves, Talks(), max_epochs=2).fit(Model(0.012), train(30, 0.006), DataLoader(Slow(1, 0.3)))
    summary = curves.summary
    assert (summary["steps"], summary["copy_frac"]) == (57, None)
    assert 0.1 < summary["wait_frac"] < 0.35
    assert 0.45 < summary["compute_frac"] < 0.75
    assert 0.1 < summary["host_frac"] < 0.35
    assert "num_workers=0" in summary["advice"]
    assert summary["step_ms_p95"] < 100, "validation was counted to a step"


@pytest.mark.parametrize("sized", [True, False])
def test_waiting_is_told_with_and_without_a_length(trainer: Callable[..., pl.Trainer], sized: bool) -> None:
    class Unsized:
        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(40):
                time.sleep(0.02)
                yield torch.ones(1, 4)

    curves = GPUCurves(quiet=True)
    trainer(curves).fit(Model(), train(40, 0.02) if sized else Unsized())
    assert curves.summary["wait_frac"] > 0.5
    assert curves.summary["steps"] >= 36


def test_where_a_trainer_tells_nothing_of_waiting_the_rest_is_timed(
    trainer: Callable[..., pl.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wellfed.monitor.gpu_curves._FETCHING", ("_on_no_such_thing", "_nor_this"))
    curves = GPUCurves(quiet=True)
    trainer(curves).fit(Model(0.005), train(40))
    summary = curves.summary
    assert (summary["wait_frac"], summary["readiness_frac"]) == (None, None)
    assert 5 < summary["step_ms_p50"] < 100
    assert "is unknown here" in summary["advice"]


def test_several_fits_and_other_passes_have_their_own_lines(
    trainer: Callable[..., pl.Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "telemetry.csv"
    curves = GPUCurves(path, interval_s=0.1)
    for number in (15, 40):
        trainer(curves, num_sanity_val_steps=1).fit(Model(0.01), train(number), DataLoader(Slow(4)))
        assert curves.summary["steps"] == number - 3
    trainer(curves).validate(Model(), DataLoader(Slow(4)), verbose=False)
    assert capsys.readouterr().out.count("steps/s") == 2
    times = [float(row["time_s"]) for row in rows_of(path)]
    assert times == sorted(times)
    assert times[-1] > 0.5, "the second fit has begun the file anew"
    assert pickle.loads(pickle.dumps(curves)).summary == curves.summary


@pytest.mark.parametrize(("error", "raised"), [(ValueError("mine"), ValueError), (KeyboardInterrupt(), SystemExit)])
def test_an_error_goes_on_its_way_and_the_lines_are_there(
    trainer: Callable[..., pl.Trainer], capsys: pytest.CaptureFixture[str], error: BaseException, raised: type
) -> None:
    made = trainer(GPUCurves())
    with pytest.raises(raised):
        made.fit(Model(error=error), train())
    assert "over 27 steps" in capsys.readouterr().out
    assert not {"_on_before_fetch", "_on_after_fetch"} & vars(made.fit_loop.epoch_loop).keys()


def test_a_profiler_of_the_users_goes_on(trainer: Callable[..., pl.Trainer]) -> None:
    profiler = SimpleProfiler()
    trainer(GPUCurves(quiet=True), profiler=profiler).fit(Model(), train(10))
    assert len(profiler.recorded_durations["run_training_batch"]) == 10


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


def test_a_logger_that_fails_is_left_alone_and_others_go_on(
    trainer: Callable[..., pl.Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, curves = Broken(), GPUCurves(interval_s=0.1, quiet=True)
    with caplog.at_level(logging.WARNING):
        trainer(curves, logger=[broken, CSVLogger(tmp_path / "csv")]).fit(Model(0.01), train(30))
    assert [message for message in caplog.messages if "curves" in message] == [
        "Broken gets no curves any more (OSError: no such server)."
    ]
    assert len(broken.calls) == 1
    assert len(logged(columns(tmp_path / "csv"), "host/rss_gib")) >= 1
    assert curves.summary["steps"] == 27


@pytest.mark.slow
def test_a_slow_logger_gets_means_and_costs_little(trainer: Callable[..., pl.Trainer]) -> None:
    slow = Broken(call_s=0.05)
    began_s = time.monotonic()
    trainer(GPUCurves(interval_s=0.1, quiet=True), logger=slow).fit(Model(0.03), train(80))
    assert time.monotonic() - began_s > 2
    assert len(slow.calls) <= 4  # a row and the parts, at the first chance and at the end
    assert all("host/rss_gib" in call or "step/compute_ms" in call for call in slow.calls)


@pytest.mark.parametrize(
    "hook", ["Watch.start", "Steps.done", "Steps.got", "Watch.enter", "Watch.summary", "Watch.stop"]
)
def test_an_error_of_ours_harms_nothing(
    trainer: Callable[..., pl.Trainer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    monkeypatch.setattr(f"wellfed.monitor.loop_watch.Loop{hook}", lambda *given, **named: 1 / 0)
    made = trainer(GPUCurves())
    with caplog.at_level(logging.WARNING):
        made.fit(Model(), train(10), DataLoader(Slow(2)))
    assert made.global_step == 10
    (told,) = [message for message in caplog.messages if "watches no more" in message]
    assert "ZeroDivisionError" in told


def test_other_processes_of_the_machine_only_train(
    trainer: Callable[..., pl.Trainer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pl.Trainer, "local_rank", 1)
    curves = GPUCurves()
    trainer(curves).fit(Model(), train(10))
    assert (capsys.readouterr().out, curves.summary) == ("", {})


@pytest.mark.usefixtures("card")
@pytest.mark.slow
def test_wandb_draws_curves_against_their_time_and_the_rest_as_ever(
    trainer: Callable[..., pl.Trainer], tmp_path: Path
) -> None:
    found = {}
    for name, callbacks in (("bare", []), ("watched", [GPUCurves(interval_s=0.1, quiet=True)])):
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


@given(
    number=st.integers(0, 30),
    most=st.integers(1, 40),
    values=st.lists(st.floats(0, 100), min_size=30, max_size=30),
)
def test_rows_for_a_logger_are_few_and_keep_the_mean(number: int, most: int, values: list[float]) -> None:
    rounds = [[Sample(float(at), 0, "train", at % 2 - 1, {"cpu_pct": values[at]})] for at in range(number)]
    rows = thinned(rounds, most)
    assert len(rows) == min(number, most)
    assert [row["telemetry/time_s"] for row in rows] == sorted(row["telemetry/time_s"] for row in rows)
    if rows:
        assert rows[-1]["telemetry/time_s"] == number - 1
        for row in rows:
            figures = [value for name, value in row.items() if name != "telemetry/time_s"]
            assert figures
            assert all(min(values) - 1e-9 <= value <= max(values) + 1e-9 for value in figures)


def test_without_loggers_nothing_is_gathered_for_them(
    trainer: Callable[..., pl.Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []
    monkeypatch.setattr(LoopSteps, "latest", lambda self, number: gathered.append(number) or [])
    trainer(GPUCurves(quiet=True)).fit(Model(), train(200, 0))
    assert len(gathered) <= 5
    assert sum(gathered) == 200


def test_an_interval_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match=r"readings are at least 0\.1 s apart"):
        GPUCurves(interval_s=0.01)
