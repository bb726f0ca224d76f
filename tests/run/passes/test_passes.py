"""Passes of a run: evaluation, and a ceiling that never ends a run."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from tests.kit.composed import compose
from tests.kit.few import few, slow
from wellfed.contract import Datasets, LossOutput
from wellfed.errors import ConfigError
from wellfed.observe.hardware.detect import machine
from wellfed.observe.loggers.journal import Journal
from wellfed.process import StopRequest
from wellfed.record.entries import RunRecord
from wellfed.run.bookkeeper import Bookkeeper
from wellfed.run.passes.base import RunPasses
from wellfed.run.passes.choice import passes_class
from wellfed.run.planner import Planner
from wellfed.run.screen import Terminal
from wellfed.train.step.non_finite import NonFiniteLoss

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Line(nn.Module):
    """A model that records the sizes of its batches, and fails if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 1)
        self.sizes: list[int] = []
        self.fails_with: BaseException | None = None

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        if self.fails_with is not None:
            raise self.fails_with
        self.sizes.append(len(batch["x"]))
        values = self.out(batch["x"])
        return LossOutput(values.square().mean(), {"mean": values.mean()}, predictions=values, targets=batch["x"])


class Numbers:
    """22 samples: five steps of 4 and one of 2."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([float(index)])}


def datasets() -> Datasets:
    return Datasets(train=Numbers())


def in_pairs(samples: list[Any]) -> Any:
    """Collates every second sample."""
    return default_collate(samples[::2])


def three_splits() -> Datasets:
    return Datasets(Numbers(), Numbers(), Numbers(), eval_collate={"test": in_pairs}, eval_batch_size={"val": 11})


def passes_of(
    tmp_path: Path, *overrides: str, data: str = "datasets", **more_workload: Any
) -> tuple[RunPasses, Journal, Any]:
    made = compose(
        ["logger=none", "loader=baseline", "trainer.accelerator=cpu", "telemetry.ceiling_steps=5", *overrides]
    )
    workload = replace(
        made.config.workload,
        name="w",
        effective_batch_size=4,
        data={"_target_": f"{__name__}.{data}"},
        **{
            "model": {"_target_": f"{__name__}.Line"},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.001},
            **more_workload,
        },
    )
    config = replace(made.config, workload=workload)
    planner = Planner.start(replace(made, config=config), machine())
    parts, plan = planner.parts, planner.rough()
    books = Bookkeeper(RunRecord.start("w"), tmp_path, config)
    return passes_class(parts)(config, parts, plan, books, rank=0), books.journal, parts.model


def fit(passes: RunPasses) -> None:
    passes.fit(Terminal(quiet=True), StopRequest(), None, lambda: None)


class Sleeps(pl.Callback):
    """A user's callback that takes 20 ms in one hook."""

    def __init__(self, hook: str) -> None:
        self.own = hook

    def _sleep(self, hook: str) -> None:
        if hook == self.own:
            time.sleep(0.02)

    def on_train_batch_start(self, *_: Any) -> None:
        self._sleep("on_train_batch_start")

    def on_validation_end(self, *_: Any) -> None:
        self._sleep("on_validation_end")


class SlowLR(torch.optim.lr_scheduler.ConstantLR):
    """A scheduler that takes 20 ms a step."""

    def step(self, *_: Any) -> None:
        time.sleep(0.02)
        super().step()


def wall_of(tmp_path: Path, *overrides: str, data: str = "datasets", **more_workload: Any) -> Any:
    """Returns the wall time of two epochs by account."""
    limits = ("trainer.max_epochs=2", "trainer.sanity_batches=0", "trainer.checkpoint_every_steps=4")
    passes, journal, _ = passes_of(tmp_path, *limits, *overrides, data=data, **more_workload)
    fit(passes)
    journal.save()
    passes._books._fill_in({})
    wall = journal.record.wall
    assert wall is not None
    parts = sum(value for name, value in wall.items() if name not in ("total_s", "callbacks"))
    assert parts + sum(wall["callbacks"].values()) == pytest.approx(wall["total_s"], rel=0.01)
    assert wall["other_s"] < 0.01 * wall["total_s"]
    assert all(value >= 0 for name, value in wall.items() if name != "callbacks")
    return wall


@pytest.mark.parametrize(("hook", "times"), [("on_train_batch_start", 12), slow("on_validation_end", 2)])
def test_each_hook_of_a_callback_is_timed_by_its_class(tmp_path: Path, hook: str, times: int) -> None:
    own = (f"+callbacks.own._target_={__name__}.Sleeps", f"+callbacks.own.hook={hook}")
    wall = wall_of(tmp_path, *own, data="three_splits")
    assert next(iter(wall["callbacks"])) == f"Sleeps.{hook}"
    assert wall["callbacks"][f"Sleeps.{hook}"] >= 0.02 * times
    assert all(name.startswith("Sleeps.") for name in wall["callbacks"])


def test_without_callbacks_there_is_nothing_of_them_and_the_rest_has_its_names(tmp_path: Path) -> None:
    wall = wall_of(tmp_path, data="three_splits")
    assert wall["callbacks"] == {}
    for part in ("start_s", "steps_s", "validation_s", "checkpoint_s", "epoch_end_s", "end_s"):
        assert wall[part] > 0, part


class OwnModule(pl.LightningModule):
    """A module that takes 20 ms at the end of an epoch, and before each step of its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.out(batch["x"]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.001)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": SlowLR(optimizer), "interval": "epoch"}}

    def on_train_epoch_end(self) -> None:
        time.sleep(0.02)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        time.sleep(0.02)


def test_so_are_hooks_of_a_users_own_module(tmp_path: Path) -> None:
    wall = wall_of(tmp_path, model={"_target_": f"{__name__}.OwnModule"}, optimizer=None)
    assert {"OwnModule.on_before_optimizer_step", "OwnModule.on_train_epoch_end"} <= {*wall["callbacks"]}
    assert wall["callbacks"]["OwnModule.on_before_optimizer_step"] >= 12 * 0.02
    assert wall["callbacks"]["OwnModule.on_train_epoch_end"] >= 2 * 0.02


class WithHoles(Numbers):
    """Data whose sample 13 is NaN."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([math.nan if index == 13 else float(index)])}


def with_holes() -> Datasets:
    return Datasets(train=WithHoles())


def place_of(sample: int, passes: RunPasses) -> tuple[int, int]:
    """Returns epoch and batch in which a sample comes first."""
    order = passes._loader._order
    return next((0, batch) for batch in range(6) if sample in order.share(0, batch).indices.tolist())


@pytest.mark.parametrize("loader", ["baseline", "auto"])
def test_a_sample_that_is_no_number_is_named_and_not_the_learning_rate(tmp_path: Path, loader: str) -> None:
    passes, _, _ = passes_of(
        tmp_path, "trainer.max_epochs=3", "trainer.log_every_steps=8", f"loader={loader}", data="with_holes"
    )
    with pytest.raises(NonFiniteLoss) as raised:
        fit(passes)
    epoch, batch = place_of(13, passes)
    assert str(raised.value) == (
        f"WithHoles: training sample 13 holds NaN (epoch {epoch}, batch {batch}), so the loss is no finite number."
    )
    assert raised.value.__notes__[0].startswith("Repair it, or set loader.skip_ids=[13]")
    assert passes._books.bad_sample == {"sample": 13, "epoch": epoch, "batch": batch, "value": "NaN"}


class Slow(Line):
    """A model whose step takes 50 ms."""

    def loss(self, batch: dict[str, Tensor]) -> LossOutput:
        time.sleep(0.05)
        return super().loss(batch)


@pytest.mark.parametrize(("most_s", "is_measured"), [slow(1.2, True), (0.2, False)])
def test_the_ceiling_takes_its_time_and_no_more(
    tmp_path: Path, monkeypatch, capsys, most_s: float, is_measured: bool
) -> None:
    monkeypatch.setattr("wellfed.run.passes.ceiling._CEILING_S", most_s)
    model = {"_target_": f"{__name__}.Slow"}
    passes, _, model = passes_of(tmp_path, "trainer.max_epochs=1", "telemetry.ceiling_steps=1000", model=model)
    fit(passes)
    steps = len(model.sizes)
    rate = passes.ceiling.measure(Terminal())
    printed = capsys.readouterr().out
    if is_measured:
        assert rate is not None
        assert 5 <= len(model.sizes) - steps <= most_s / 0.05
    else:
        assert rate is None
        assert len(model.sizes) == steps
        assert "The ceiling is not measured: that would take longer than 200 ms." in printed


def kinds(journal: Journal) -> list[str]:
    return [event["kind"] for event in journal.record.events]


@pytest.mark.parametrize("steps", [6, *map(slow, (4, 5, 7))])
def test_the_ceiling_has_whole_batches_wherever_training_ended(tmp_path: Path, steps: int) -> None:
    passes, journal, model = passes_of(tmp_path, f"trainer.max_steps={steps}", "trainer.max_epochs=null")
    fit(passes)
    assert model.sizes == [4, 4, 4, 4, 4, 2, 4][:steps]
    rate = passes.ceiling.measure(Terminal(quiet=True))
    assert rate is not None
    assert model.sizes[steps:] == [4] * 8
    assert "ceiling_failed" not in kinds(journal)


def test_data_parallel_within_the_model_is_told_when_training_starts(tmp_path: Path) -> None:
    passes, journal, model = passes_of(tmp_path, "trainer.max_steps=1", "trainer.max_epochs=null")
    model.out = nn.Sequential(nn.DataParallel(model.out))
    assert "data_parallel" not in kinds(journal)
    fit(passes)
    (event,) = (event for event in journal.record.events if event["kind"] == "data_parallel")
    assert (event["module"], event["step"]) == ("out.0", 0)


def test_a_ceiling_that_fails_is_an_event_and_nothing_else(tmp_path: Path) -> None:
    passes, journal, model = passes_of(tmp_path, "trainer.max_steps=3", "trainer.max_epochs=null")
    fit(passes)
    weights = [parameter.clone() for parameter in model.parameters()]
    before = kinds(journal)
    model.fails_with = ValueError("no such step\nand more")
    assert passes.ceiling.measure(Terminal(quiet=True)) is None
    assert kinds(journal) == [*before, "ceiling_failed"]
    assert "ValueError: no such step (test_passes.py:" in journal.record.events[-1]["message"]
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("more", [("telemetry.ceiling_steps=0",), ("telemetry=none",)])
def test_a_ceiling_that_was_not_asked_for_takes_no_step(tmp_path: Path, more: Sequence[str]) -> None:
    passes, _, model = passes_of(tmp_path, *more)
    assert passes.ceiling.measure(Terminal(quiet=True)) is None
    assert model.sizes == []
    assert passes.ceiling.warm_up() is None
    assert model.sizes == [4] * 4


ONE_STEP = ("trainer.max_steps=1", "trainer.max_epochs=null")


def test_each_split_has_its_batches(tmp_path: Path) -> None:
    passes, _, model = passes_of(tmp_path, *ONE_STEP, "trainer.sanity_batches=0", data="three_splits")
    fit(passes)
    passes.test()
    assert model.sizes == [4, 11, 11, *[2] * 5, 1]


def test_the_knob_goes_before_the_data(tmp_path: Path) -> None:
    overrides = (*ONE_STEP, "trainer.sanity_batches=0")
    passes, _, model = passes_of(tmp_path, *overrides, data="three_splits", eval_batch_size=22)
    fit(passes)
    assert model.sizes == [4, 22]


def test_a_batch_of_each_split_is_tried_before_training(tmp_path: Path) -> None:
    passes, _, model = passes_of(tmp_path, *ONE_STEP, data="three_splits")
    fit(passes)
    assert model.sizes == [11, 2, 4, 11, 11]
    assert set(passes.figures.latest) >= {"val/loss", "val/mean"}


def by_loaders() -> Datasets:
    """Returns loaders of training and validation with one generator."""
    drawn = torch.Generator().manual_seed(5)
    loaders = [DataLoader(Numbers(), batch_size=4, shuffle=True, generator=drawn) for _ in range(2)]
    return Datasets(*loaders)


def views() -> Datasets:
    """Returns a loader whose batches hold each sample twice, as contrastive learning has them."""
    return Datasets(DataLoader(Numbers(), batch_size=4, collate_fn=lambda rows: default_collate([*rows, *rows])))


@pytest.mark.parametrize(("typed", "sizes"), [((), [8]), (("memory.micro_batch=4",), [4, 4])])
def test_a_batch_with_more_rows_than_samples_stays_whole_unless_told(
    tmp_path: Path, typed: Sequence[str], sizes: list[int]
) -> None:
    passes, _, model = passes_of(tmp_path, *ONE_STEP, *typed, data="views")
    fit(passes)
    assert model.sizes == sizes


@pytest.mark.parametrize("loader", [slow("baseline"), "own"])
def test_a_generator_of_the_users_own_is_left_as_it_was(tmp_path: Path, loader: str) -> None:
    weights = []
    for batches in (0, 1):
        overrides = (*ONE_STEP, f"trainer.sanity_batches={batches}", f"loader={loader}")
        passes, _, model = passes_of(tmp_path, *overrides, data="by_loaders")
        fit(passes)
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*weights)


def test_a_broken_validation_ends_a_run_before_its_first_step(tmp_path: Path) -> None:
    passes, _, model = passes_of(tmp_path, *ONE_STEP, data="three_splits")
    model.fails_with, started = KeyError("entry"), []
    with pytest.raises(KeyError) as caught:
        passes.fit(Terminal(quiet=True), StopRequest(), None, lambda: started.append(True))
    assert (started, model.sizes) == ([], [])
    told = "in the val batches that are tried before training; trainer.sanity_batches=0 tries none"
    assert told in caught.value.__notes__


MAX_ACCURACY = ("trainer.best_metric=accuracy", "trainer.best_mode=max")


def test_a_best_metric_that_validation_does_not_give_is_a_fault(tmp_path: Path) -> None:
    passes, _, model = passes_of(tmp_path, *ONE_STEP, *MAX_ACCURACY, data="three_splits")
    with pytest.raises(ConfigError, match=r"trainer.best_metric=accuracy.*one of loss, mean"):
        fit(passes)
    assert model.sizes == [11]


class LogsAccuracy(OwnModule):
    """A module that logs under the name of the split."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/acc", self.out(batch["x"]).mean())


@pytest.mark.parametrize("name", few(["val/acc", "val_acc", "acc"], 1))
def test_the_best_metric_of_a_users_own_module_may_be_named_as_it_is_logged(tmp_path: Path, name: str) -> None:
    passes, _, _ = passes_of(
        tmp_path,
        "trainer.max_epochs=1",
        f"trainer.best_metric={name}",
        "trainer.best_mode=max",
        data="three_splits",
        model={"_target_": f"{__name__}.LogsAccuracy"},
        optimizer=None,
    )
    fit(passes)
    assert (tmp_path / "checkpoints" / "best.ckpt").exists()


def test_a_best_metric_without_validation_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    passes, _, _ = passes_of(tmp_path, *ONE_STEP, *MAX_ACCURACY)
    fit(passes)
    assert any("trainer.best_metric=accuracy has no effect" in line for line in caplog.messages)


MAE = {"_target_": "torchmetrics.MeanAbsoluteError"}
COLLECTED = {"_target_": "torchmetrics.MetricCollection", "metrics": [MAE]}


@pytest.mark.parametrize(
    "metrics",
    [[MAE], *map(slow, (COLLECTED, MAE, {"MeanAbsoluteError": MAE}))],
)
def test_metrics_of_torchmetrics_from_the_configuration(tmp_path: Path, metrics: Any) -> None:
    passes, _, _ = passes_of(tmp_path, *ONE_STEP, data="three_splits", metrics=metrics)
    fit(passes)
    passes.test()
    assert {"val/MeanAbsoluteError", "val/loss", "test/MeanAbsoluteError"} < set(passes.figures.latest)


def test_metrics_that_are_none_are_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload.metrics.*can't be collected.*Name classes of torchmetrics"):
        passes_of(tmp_path, metrics={"_target_": f"{__name__}.datasets"})
